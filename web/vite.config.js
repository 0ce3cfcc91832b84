// One app.js, one app.css: the server serves them, the static report inlines the same two.
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
    assetsInlineLimit: 0, // data: addresses are forbidden by our content security policy
    modulePreload: false,
    rolldownOptions: {
      output: { codeSplitting: false, entryFileNames: "app.js", assetFileNames: "app[extname]" },
    },
  },
  // `npm run dev` beside a running `sonde ui --port 7007`; open its address with the token, port 5173.
  server: {
    host: "127.0.0.1",
    proxy: {
      "/api": {
        target: server,
        changeOrigin: true,
        // The server takes changes only from its own pages.
        configure: (proxy) => proxy.on("proxyReq", (request) => request.setHeader("origin", server)),
      },
    },
  },
}));
