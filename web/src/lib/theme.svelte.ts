// Light and dark mode, following the system until the user chooses, and the theme colours for canvas code.

const KEY = "sonde.theme";
type Choice = "system" | "light" | "dark";

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function savedChoice(): Choice {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system"; // some frames forbid storage: the choice is then lost on reload
  }
}

class Theme {
  choice = $state<Choice>(savedChoice());
  system = $state<"light" | "dark">(dark.matches ? "dark" : "light");

  constructor() {
    dark.addEventListener("change", () => (this.system = dark.matches ? "dark" : "light"));
    this.apply();
  }

  get name(): "light" | "dark" {
    return this.choice === "system" ? this.system : this.choice;
  }

  toggle(): void {
    const next = this.name === "dark" ? "light" : "dark";
    this.choice = next === this.system ? "system" : next;
    try {
      if (this.choice === "system") localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, this.choice);
    } catch {
      // see savedChoice()
    }
    this.apply();
  }

  private apply(): void {
    document.documentElement.dataset.theme = this.name;
  }
}

export const theme = new Theme();

export interface Colours {
  text: string;
  muted: string;
  line: string;
  grid: string;
  surface: string;
  accent: string;
  critical: string;
  warning: string;
  info: string;
  ok: string;
  series: string[];
}

// The Okabe-Ito palette, adjusted to a contrast of 3:1 with the background.
const SERIES = {
  light: ["#0072b2", "#c05000", "#00795a", "#a3477f", "#7a6a00", "#2b8fc4", "#5b4ba0", "#444444"],
  dark: ["#56b4e9", "#f0913c", "#2fc39a", "#e18fc0", "#e6d23c", "#8ecdf5", "#ada0f0", "#c8c8c8"],
};
const NAMES = ["text", "muted", "line", "grid", "surface", "accent", "critical", "warning", "info", "ok"] as const;

/** The current theme colours. Call inside an effect to re-run it when the theme changes. */
export function colours(): Colours {
  const name = theme.name;
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const entries = NAMES.map((key) => {
    probe.style.color = `var(--${key})`;
    return [key, getComputedStyle(probe).color] as const;
  });
  probe.remove();
  return { ...(Object.fromEntries(entries) as unknown as Omit<Colours, "series">), series: SERIES[name] };
}
