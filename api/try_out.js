// Forms that send requests from /docs. The key stays in this page: it is not stored, and sent to this API only.
"use strict";
let description = null;

function field(label, name, required) {
  const line = document.createElement("label");
  const input = document.createElement("input");
  Object.assign(input, {name, required});
  line.append(label + " ", input);
  return line;
}

function keyField() {
  let input = document.getElementById("key");
  if (!input) {
    const line = field("Key for all requests of this page ", "", false);
    input = line.lastChild;
    Object.assign(input, {id: "key", type: "password", autocomplete: "off"});
    document.querySelector("h1").after(line);
  }
  return input;
}

async function send(form, method, path, output) {
  const query = new URLSearchParams();
  const headers = {};
  for (const input of form.querySelectorAll("input")) {
    const [place, name] = input.name.split(/:(.*)/);
    if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(input.value));
    else if (place === "query" && input.value) query.append(name, input.value);
    else if (place === "header" && input.value) headers[name] = input.value;
  }
  const key = keyField().value;
  if (key) headers.Authorization = `Bearer ${key}`;
  const body = form.querySelector("textarea");
  if (body && body.value) headers["Content-Type"] = body.name;
  const url = path.slice(1) + (query.size ? `?${query}` : "");
  const options = {method: method.toUpperCase(), headers, credentials: "omit", signal: AbortSignal.timeout(30000)};
  if (body && body.value) options.body = body.value;
  try {
    const answer = await fetch(url, options);
    const text = await answer.text();
    let shown = text;
    try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* It is not JSON. */ }
    output.textContent = `${answer.status} ${answer.statusText}\n${shown}`;
  } catch (error) {
    output.textContent = String(error);
  }
}

async function open(details) {
  if (!details.open || details.querySelector("form")) return;
  const form = document.createElement("form");
  details.append(form);
  description ??= await (await fetch("openapi.json")).json();
  const {method, path} = details.dataset;
  const operation = description.paths[path][method];
  for (const one of operation.parameters ?? []) {
    form.append(field(`${one.name} (${one.in})`, `${one.in}:${one.name}`, one.required === true));
  }
  const [media] = Object.keys(operation.requestBody?.content ?? {});
  if (media) form.append(Object.assign(document.createElement("textarea"), {name: media, ariaLabel: `Body: ${media}`}));
  form.append(Object.assign(document.createElement("button"), {textContent: "Send"}));
  const output = document.createElement("pre");
  form.append(output);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form, method, path, output);
  });
}

keyField();
for (const details of document.querySelectorAll("details[data-path]")) {
  details.addEventListener("toggle", () => open(details));
}
