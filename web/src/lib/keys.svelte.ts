// Which key does what, in one registry: `?` lists exactly what is bound now. Sequences are written "g r".

import { onMount } from "svelte";

export interface Binding {
  /** What is pressed: "t", "g r", "ArrowLeft". */
  keys: string;
  /** What it does, in a few words. */
  label: string;
  /** Heading in the list. */
  group: string;
  run: (event: KeyboardEvent) => void;
}

const PATIENCE_MS = 1200;

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
    // The last bound wins: a view may take a key from the shell.
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
    if (keys) this.timer = setTimeout(() => (this.pending = ""), PATIENCE_MS);
  }
}

function isTyping(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  if (document.querySelector("dialog[open]")) return true;
  if (target.isContentEditable || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement) return true;
  return target instanceof HTMLInputElement && !["checkbox", "radio", "button"].includes(target.type);
}

export const keys = new Keys();

/** Bind for as long as the component that calls this lives. */
export function useKeys(bindings: Binding[]): void {
  onMount(() => keys.bind(bindings));
}
