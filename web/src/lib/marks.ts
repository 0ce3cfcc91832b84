// Findings in order of importance, and as marks on the step axis of a chart.

import type { Finding } from "./api";
import type { Mark } from "./chart";
import { to } from "./router.svelte";

const ORDER = { critical: 0, warning: 1, info: 2 } as const;

/** Causes before consequences, then by severity, confidence and step. */
export function byImportance(findings: readonly Finding[]): Finding[] {
  return [...findings].sort(
    (a, b) => Number(a.is_explained) - Number(b.is_explained) || ORDER[a.severity] - ORDER[b.severity] || b.confidence - a.confidence || a.step - b.step,
  );
}

/** Open findings that are not a consequence of another, as shown on the overview. */
export function open(findings: readonly Finding[]): Finding[] {
  return byImportance(findings.filter(({ state, is_explained }) => state === "open" && !is_explained));
}

export function marksOf(run: string, findings: readonly Finding[]): Mark[] {
  return open(findings)
    .filter(({ severity }) => severity !== "info")
    .map((finding) => ({
      step: finding.step,
      last: finding.last_step,
      severity: finding.severity,
      label: `${finding.severity}: ${finding.message}`,
      href: to(run, "findings", { f: finding.key }),
    }));
}
