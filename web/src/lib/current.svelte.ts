// The run that is currently open, for the top bar.

import type { Findings, RunDetail, Status } from "./api";
import { live } from "./live.svelte";

class Current {
  detail = $state.raw<RunDetail | null>(null);
  findings = $state.raw<Findings | null>(null);
  /** Whether the URL names a run that does not exist, so that there are no views to link to. */
  isMissing = $state(false);

  /** The latest status: nudges arrive before the run is fetched again. */
  get status(): Status {
    const { detail } = this;
    return (detail && live.runs.get(detail.id)?.status) ?? detail?.status ?? "running";
  }

  private get open() {
    return (this.findings?.findings ?? []).filter(({ state, is_explained }) => state === "open" && !is_explained);
  }

  get numOpen(): number {
    return this.open.filter(({ severity }) => severity !== "info").length;
  }

  get numCritical(): number {
    return this.open.filter(({ severity }) => severity === "critical").length;
  }
}

export const current = new Current();
