"""What the chart gives to Prometheus and Grafana, judged by Prometheus' own programs."""
