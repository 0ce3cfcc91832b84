// Registry of keyboard shortcuts; `?` lists the current bindings. Sequences are written "g r".

import { onMount } from "svelte";

export interface Binding {
  /** The key or sequence: "t", "g r", "ArrowLeft". */
  keys: string;
  /** Short description of the action. */
  label: string;
  /** Heading in the list of shortcuts. */
  group: string;
  run: (event: KeyboardEvent) => void;
}

/** How long to wait for the next key of a sequence. */
const SEQUENCE_TIMEOUT_MS = 1200;

class Keys {
  bindings = $state.raw<Binding[]>([]);
  pending = $state("");
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor() {
    document.addEventListener("keydown", (event) => this.press(event));
  }

  bind(added: Binding[]): () => void {
    this.bindings = [...this.bindings, ...added];
    return () => (this.bindings = this.bindings.filter((binding) => !added.includes(binding)));
  }

  private press(event: KeyboardEvent): void {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (["Shift", "Control", "Alt", "Meta"].includes(event.key)) return;
    const keys = this.pending ? `${this.pending} ${event.key}` : event.key;
    // The most recent binding wins, so that a view can override a global key.
    const found = this.bindings.findLast((binding) => binding.keys === keys);
    if (found) {
      event.preventDefault();
      this.wait("");
      found.run(event);
    } else if (this.bindings.some((binding) => binding.keys.startsWith(`${keys} `))) {
      event.preventDefault();
      this.wait(keys);
    } else {
      this.wait("");
    }
  }

  private wait(keys: string): void {
    clearTimeout(this.timer);
    this.pending = keys;
    if (keys) this.timer = setTimeout(() => (this.pending = ""), SEQUENCE_TIMEOUT_MS);
  }
}

function isTyping(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  if (document.querySelector("dialog[open]")) return true;
  if (target.isContentEditable || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement) return true;
  return target instanceof HTMLInputElement && !["checkbox", "radio", "button"].includes(target.type);
}

export const keys = new Keys();

/** Bind keys for the lifetime of the calling component. */
export function useKeys(bindings: Binding[]): void {
  onMount(() => keys.bind(bindings));
}
