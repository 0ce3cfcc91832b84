// Starts the page: signs in with the token of the printed address, then shows the application.

import { mount } from "svelte";
import "./app.css";
import App from "./App.svelte";

const target = document.getElementById("app");
if (!target) throw new Error("index.html has no #app");
mount(App, { target });
