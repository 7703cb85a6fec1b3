// Fetches the changing part of the page when something has changed. A tab in the background waits until it is shown.
"use strict";
let missed = false;

function refresh() {
  missed = document.hidden;
  if (!missed) htmx.trigger(document.body, "changed");
}

function take(what) {
  if (what === "ended") location.reload();
  else if (what === "changed") refresh();
  else document.getElementById("connection").textContent =
    what === "lost" ? "The connection is lost; the page shows what was last known." : "";
}

// On a phone the views are a row that scrolls: the present one is shown.
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
document.addEventListener("visibilitychange", () => missed && refresh());
if (window.SharedWorker) {
  const port = new SharedWorker("/console/static/changes.js").port;
  port.onmessage = event => take(event.data);
  addEventListener("pagehide", () => port.postMessage("gone"));
  addEventListener("pageshow", event => event.persisted && location.reload());
} else setInterval(refresh, 15000);
