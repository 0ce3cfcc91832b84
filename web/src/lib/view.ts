// What every view of one run is given. The rest it asks for itself; its own state is in `router.query`.

import type { Findings, RunDetail, Sites } from "./api";

export interface RunView {
  /** Id of the run, as in requests and addresses. */
  run: string;
  /** Kept up to date while the run is written. */
  detail: RunDetail;
  sites: Sites;
  /** null until they are worked out. */
  findings: Findings | null;
}
