// Light and dark follow the system until `t` is pressed. Canvas code asks here for colours, as CSS cannot reach it.

const KEY = "sonde.theme";
type Choice = "system" | "light" | "dark";

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function remembered(): Choice {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system"; // storage is forbidden in some frames: the choice then lasts as long as the page
  }
}

class Theme {
  choice = $state<Choice>(remembered());
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
      // see remembered()
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

// Okabe and Ito's colours, darkened or lightened so that each has contrast 3:1 on its ground.
const SERIES = {
  light: ["#0072b2", "#c05000", "#00795a", "#a3477f", "#7a6a00", "#2b8fc4", "#5b4ba0", "#444444"],
  dark: ["#56b4e9", "#f0913c", "#2fc39a", "#e18fc0", "#e6d23c", "#8ecdf5", "#ada0f0", "#c8c8c8"],
};
const NAMES = ["text", "muted", "line", "grid", "surface", "accent", "critical", "warning", "info", "ok"] as const;

/** The colours now in force, resolved; read inside an effect to be told of changes. */
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
