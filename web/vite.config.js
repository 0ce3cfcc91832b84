// Builds one app.js and one app.css, which the server serves and the static report inlines.
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

const server = process.env.SONDE_SERVER ?? "http://127.0.0.1:7007";

export default defineConfig(({ command }) => ({
  plugins: [svelte()],
  base: command === "build" ? "/static/" : "/",
  build: {
    outDir: process.env.SONDE_WEB_OUT ?? "../src/sonde/show/web/static",
    emptyOutDir: true,
    target: ["chrome125", "firefox125", "safari17.5"], // light-dark(), DecompressionStream
    cssCodeSplit: false,
    assetsInlineLimit: 0, // our content security policy forbids data: URLs
    modulePreload: false,
    rolldownOptions: {
      output: { codeSplitting: false, entryFileNames: "app.js", assetFileNames: "app[extname]" },
    },
  },
  // Use `npm run dev` next to a running `sonde ui --port 7007`, and open its URL (with the token) on port 5173.
  server: {
    host: "127.0.0.1",
    proxy: {
      "/api": {
        target: server,
        changeOrigin: true,
        // The server accepts changes only from its own origin.
        configure: (proxy) => proxy.on("proxyReq", (request) => request.setHeader("origin", server)),
      },
    },
  },
}));
