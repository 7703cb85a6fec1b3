// One stream of changes for all tabs of the browser: a browser opens only six connections to a host.
"use strict";
const tabs = new Set();
let source = null;
let state = "live";

function tell(what) {
  for (const tab of tabs) tab.postMessage(what);
}

function open() {
  source = new EventSource("/console/changes");
  source.onopen = () => {
    if (state === "lost") tell("changed");
    state = "live";
    tell(state);
  };
  source.onerror = () => {
    state = "lost";
    tell(state);
    if (source && source.readyState === EventSource.CLOSED) {
      source = null;
      setTimeout(() => source || open(), 5000);
    }
  };
  source.addEventListener("changed", () => tell("changed"));
  source.addEventListener("ended", () => {
    source.close();
    source = null;
    tell("ended");
  });
}

onconnect = event => {
  const tab = event.ports[0];
  tabs.add(tab);
  tab.onmessage = () => tabs.delete(tab);
  tab.postMessage(state);
  if (!source) open();
};
