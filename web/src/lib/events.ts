/** Repeated events of a run, folded into one. */
import type { RunEvent } from "./api";

export interface FoldedEvent {
  /** The newest of them. */
  event: RunEvent;
  count: number;
  /** The step of the oldest. */
  first_step: number;
}

/** Newest first; neighbours that differ only in their numbers become one. */
export function folded(events: readonly RunEvent[]): FoldedEvent[] {
  const found: FoldedEvent[] = [];
  for (const event of [...events].reverse()) {
    const last = found.at(-1);
    if (last && kindOf(last.event) === kindOf(event)) {
      last.count += 1;
      last.first_step = event.step;
    } else {
      found.push({ event, count: 1, first_step: event.step });
    }
  }
  return found;
}

const kindOf = (event: RunEvent) => `${event.type}\n${event.severity}\n${event.message.replace(/\d[\d.,]*(e[-+]?\d+)?/g, "#")}`;
