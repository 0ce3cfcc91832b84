// The props that all views of a run share. Views load everything else themselves and keep their state in `router.query`.

import type { Findings, RunDetail, Sites } from "./api";

export interface RunView {
  /** ID of the run in requests and URLs. */
  run: string;
  /** Updated while the run is being written. */
  detail: RunDetail;
  sites: Sites;
  /** null until they are loaded. */
  findings: Findings | null;
}
