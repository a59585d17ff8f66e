"""What is told of tokens and how likely they were: kept packed, and shown in the shapes of OpenAI's APIs."""
