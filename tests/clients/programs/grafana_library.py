"""Reads a dashboard by the classes of Grafana's own library, and writes what those keep of it: both on one line."""

import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()  # what each kind of panel and query has
dashboard = Dashboard.from_json(json.load(sys.stdin))
kinds = {
    type(part).__module__
    for panel in dashboard.panels
    for part in (getattr(panel, "options", None), *(getattr(panel, "targets", None) or []))
    if part is not None
}
sys.stdout.write(json.dumps({"kept": json.loads(JSONEncoder().encode(dashboard)), "kinds": sorted(kinds)}))
