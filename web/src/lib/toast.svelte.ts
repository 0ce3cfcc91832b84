// Short messages at the bottom of the page, optionally with an action such as "Undo".

export interface Toast {
  id: number;
  text: string;
  kind: "note" | "error";
  action?: { label: string; run: () => void };
}

const DURATION_MS = 8000;

class Toasts {
  list = $state.raw<Toast[]>([]);
  private next = 1;

  show(text: string, action?: Toast["action"], kind: Toast["kind"] = "note"): void {
    const toast: Toast = { id: this.next++, text, kind, ...(action ? { action } : {}) };
    this.list = [...this.list.slice(-2), toast];
    setTimeout(() => this.close(toast.id), DURATION_MS);
  }

  error(text: string): void {
    this.show(text, undefined, "error");
  }

  close(id: number): void {
    this.list = this.list.filter((toast) => toast.id !== id);
  }
}

export const toasts = new Toasts();
