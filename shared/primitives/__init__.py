"""Tools that know nothing of LLM serving: errors, tables of states, counters that declare their metric."""
