// Server notifications such as "run X is at step N". They carry no data; views fetch what they show again.

import { SvelteMap } from "svelte/reactivity";
import { listen, source, type Brief, type Nudge, type Status } from "./api";

export type Connection = "off" | "open" | "lost";

class Live {
  connection = $state<Connection>("off");
  /** Latest update of each run. */
  runs = new SvelteMap<string, { last_step: number; status: Status; reason: string }>();
  briefs = new SvelteMap<string, Brief>();
  /** Counters that increase when the list of runs or the states of findings change. */
  list = $state(0);
  states = $state(0);
  /** Increases on every reconnect, so that views catch up on what they missed. */
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

  /** Reconnect immediately, for the button in the banner. */
  retry(): void {
    this.stop?.();
    this.stop = null;
    this.start();
  }

  private changed(isUp: boolean): void {
    // If the connection never opened, the browser is not signed in; the page reports that itself.
    this.connection = isUp ? "open" : this.numOpened > 0 ? "lost" : "off";
    if (!isUp) return;
    // Opening the connection triggers a "runs" nudge; ignore the first one, because everything was just loaded.
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

/** Changes whenever `run` has new data, and after a reconnect. Read it in an effect that loads data. */
export function version(run: string): string {
  const update = live.runs.get(run);
  return `${live.epoch}:${update?.last_step ?? ""}:${update?.status ?? ""}`;
}
