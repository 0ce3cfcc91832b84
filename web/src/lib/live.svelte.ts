// The server's nudges: "run X is at step N". They carry no data; whoever shows the run asks again for what it shows.

import { SvelteMap } from "svelte/reactivity";
import { listen, source, type Brief, type Nudge, type Status } from "./api";

export type Connection = "off" | "open" | "away";

class Live {
  connection = $state<Connection>("off");
  /** Newest word on each run. */
  runs = new SvelteMap<string, { last_step: number; status: Status; reason: string }>();
  briefs = new SvelteMap<string, Brief>();
  /** Grow when the list of runs changed, when states of findings changed. */
  list = $state(0);
  states = $state(0);
  /** Grows when the line came back: what was missed meanwhile has to be asked for again. */
  epoch = $state(0);

  private numOpened = 0;
  private isFirst = false;
  private stop: (() => void) | null = null;

  start(): void {
    if (source.kind !== "live" || this.stop) return;
    this.stop = listen(
      (nudge) => this.receive(nudge),
      (isUp) => this.changed(isUp),
    );
  }

  /** At once, for the button in the banner. */
  retry(): void {
    this.stop?.();
    this.stop = null;
    this.start();
  }

  private changed(isUp: boolean): void {
    // A line that never was open is a browser that is not signed in; the page says that by itself.
    this.connection = isUp ? "open" : this.numOpened > 0 ? "away" : "off";
    if (!isUp) return;
    // The line says "the list changed" as it opens; at first everything has just been asked for.
    this.isFirst = this.numOpened++ === 0;
    if (!this.isFirst) this.epoch += 1;
  }

  private receive({ type, run, last_step, status, reason, brief }: Nudge): void {
    if (type === "runs" && !this.isFirst) this.list += 1;
    this.isFirst = false;
    if (type === "findings") this.states += 1;
    if (type === "brief" && run && brief) this.briefs.set(run, brief);
    if (type === "run" && run && status) this.runs.set(run, { last_step: last_step ?? -1, status, reason: reason ?? "" });
  }
}

export const live = new Live();

/** Changes whenever `run` has something new, also after the server was away: read it in an effect that loads. */
export function version(run: string): string {
  const news = live.runs.get(run);
  return `${live.epoch}:${news?.last_step ?? ""}:${news?.status ?? ""}`;
}
