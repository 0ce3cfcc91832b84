// Summaries of the checks that ran on a run. Pure functions.

import type { Findings } from "./api";
import { counted } from "./format";

type Checks = Pick<Findings, "num_rules" | "blind" | "failed" | "gaps" | "is_blind">;

/** "64 checks ran on 120 steps. 2 had no data." Empty if only findings from training are known. */
export function checksRun({ num_rules, blind, failed, is_blind }: Checks, numSteps?: number): string {
  if (num_rules === 0 || is_blind) return "";
  const ran = `${counted(num_rules - blind.length - failed.length, "check")} ran`;
  const sentences = [numSteps === undefined ? `${ran}.` : `${ran} on ${counted(numSteps, "step")}.`];
  if (blind.length) sentences.push(`${blind.length} had no data.`);
  if (failed.length) sentences.push(`${failed.length} failed.`);
  return sentences.join(" ");
}

/** The verdict on a run without findings. */
export function verdict({ is_blind }: Pick<Findings, "is_blind">): string {
  return is_blind ? "Nothing recorded to check" : "No problems found";
}

/** "1 signal not recorded · 2 of 66 checks had no data"; empty if every check ran. */
export function checksSkipped({ num_rules, blind, failed, gaps }: Checks): string {
  return [
    gaps.length ? `${counted(gaps.length, "signal")} not recorded` : "",
    blind.length ? `${blind.length} of ${counted(num_rules, "check")} had no data` : "",
    failed.length ? `${counted(failed.length, "check")} failed` : "",
  ].filter(Boolean).join(" · ");
}
