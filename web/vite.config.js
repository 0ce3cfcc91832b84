// One app.js, one app.css: the server serves them, the static report inlines the same two.
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

export default defineConfig({
  plugins: [svelte()],
  base: "/static/",
  build: {
    outDir: process.env.SONDE_WEB_OUT ?? "../src/sonde/show/web/static",
    emptyOutDir: true,
    target: ["chrome125", "firefox125", "safari17.5"], // light-dark(), DecompressionStream
    cssCodeSplit: false,
    assetsInlineLimit: 0, // data: addresses are forbidden by our content security policy
    modulePreload: false,
    rolldownOptions: {
      output: { codeSplitting: false, entryFileNames: "app.js", assetFileNames: "app[extname]" },
    },
  },
  // `npm run dev` beside a running `sonde ui --port 7007`.
  server: { host: "127.0.0.1", proxy: { "/api": process.env.SONDE_SERVER ?? "http://127.0.0.1:7007" } },
});
