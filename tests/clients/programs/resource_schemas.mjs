// Validates objects of Prometheus' operator and of the Gateway API by the schemas of their CRDs. Reads a JSON list from stdin; writes, as one line of
// JSON, what each schema has against its object ("" is nothing).
import { readFileSync } from "node:fs";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1";
import { PodMonitor, PrometheusRule } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const kinds = { HTTPRoute, PodMonitor, PrometheusRule };
const complaints = JSON.parse(readFileSync(0, "utf8")).map((thing) => {
  try {
    new kinds[thing.kind](thing).validate();
    return "";
  } catch (error) {
    return String(error.message);
  }
});
console.log(JSON.stringify(complaints));
