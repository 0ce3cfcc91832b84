// Data loaded from the server and kept up to date. The old value stays until the new one arrives. A new key cancels the
// pending request; a new revision of the same data never does. Revisions are fetched at most once a second, and less often
// when they are slow to compute, because the server shares its machine with the training.

import { untrack } from "svelte";
import { ApiError } from "./api";

const MIN_INTERVAL_MS = 1000;
/** Maximum fraction of the time that the server spends on refreshing the same data. */
const MAX_LOAD = 1 / 6;

export class Resource<T> {
  value = $state.raw<T | null>(null);
  error = $state.raw<ApiError | null>(null);
  /** True until the first response for the current key. */
  busy = $state(true);

  private abort: AbortController | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private stale = false;
  private notBefore = 0;

  /**
   * `key` identifies the data (run, range; null to load nothing). A change of `revision` loads the same data again; null
   * means that the revision is not known yet.
   */
  constructor(
    key: () => string | null,
    revision: () => string | number | null | undefined,
    private load: (signal: AbortSignal) => Promise<T>,
  ) {
    // Compared by value: their inputs change far more often than the results.
    const nextKey = $derived(key());
    const nextRevision = $derived(revision() ?? null);
    let currentKey: string | null = null;
    let currentRevision: string | number | null = null;
    $effect(() => {
      const [wantedKey, wantedRevision] = [nextKey, nextRevision];
      untrack(() => {
        const isOutdated = currentRevision !== null && wantedRevision !== currentRevision;
        currentRevision = wantedRevision;
        if (wantedKey === null) return this.cancel();
        if (wantedKey === currentKey) return isOutdated ? this.refresh() : undefined;
        currentKey = wantedKey;
        this.cancel();
        this.busy = true;
        void this.start();
      });
    });
    $effect(() => () => this.cancel());
  }

  retry(): void {
    this.cancel();
    this.error = null;
    void this.start();
  }

  private refresh(): void {
    if (this.abort) {
      this.stale = true;
      return;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => void this.start(), Math.max(0, this.notBefore - performance.now()));
  }

  private async start(): Promise<void> {
    const abort = new AbortController();
    this.abort = abort;
    this.stale = false;
    const began = performance.now();
    try {
      const value = await this.load(abort.signal);
      if (abort.signal.aborted) return;
      this.value = value;
      this.error = null;
    } catch (error) {
      if (abort.signal.aborted) return;
      this.error = error instanceof ApiError ? error : new ApiError(String(error), 0, "bug");
      if (!(error instanceof ApiError)) console.error(error);
    }
    this.abort = null;
    this.busy = false;
    const now = performance.now();
    this.notBefore = now + Math.max(MIN_INTERVAL_MS, (now - began) / MAX_LOAD);
    if (this.stale) this.refresh();
  }

  private cancel(): void {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }
}
