// One thing asked of the server, again and again: the old answer stays until the new one is there. A change of the
// question cancels the one on its way; mere news of the run never does, and is asked about at most once a second, and
// less often where answering is work: the server shares its machine with the training.

import { untrack } from "svelte";
import { ApiError } from "./api";

const SHORTEST_MS = 1000;
/** At most this share of the time is spent on answering the same question again. */
const SHARE = 1 / 6;

export class Loaded<T> {
  value = $state.raw<T | null>(null);
  error = $state.raw<ApiError | null>(null);
  /** True until the first answer to the question as it now is. */
  busy = $state(true);

  private abort: AbortController | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private stale = false;
  private notBefore = 0;

  /**
   * `question` says what is asked (which run, which range; null: nothing), `news` when the same is to be asked again
   * (null: nothing is known yet, and knowing it is no news).
   */
  constructor(
    question: () => string | null,
    news: () => string | number | null | undefined,
    private ask: (signal: AbortSignal) => Promise<T>,
  ) {
    // By value: what they are made of changes far more often than they do.
    const next = $derived(question());
    const latest = $derived(news() ?? null);
    let current: string | null = null;
    let known: string | number | null = null;
    $effect(() => {
      const [asked, heard] = [next, latest];
      untrack(() => {
        const isNews = known !== null && heard !== known;
        known = heard;
        if (asked === null) return this.cancel();
        if (asked === current) return isNews ? this.refresh() : undefined;
        current = asked;
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
      const value = await this.ask(abort.signal);
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
    this.notBefore = now + Math.max(SHORTEST_MS, (now - began) / SHARE);
    if (this.stale) this.refresh();
  }

  private cancel(): void {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }
}
