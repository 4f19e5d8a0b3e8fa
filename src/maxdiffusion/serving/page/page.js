// The page of the server: form, live queue, gallery, compare, plan. No build step, no libraries.
// Text of people reaches the page through textContent only.

const $ = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};
const IN_FORM = ["prompt", "seed", "width", "height", "num_frames", "size", "seconds", "model", "preset"];
const INPUTS = { // label in the form, key of the command line
  input_reference: ["Start image", "image_url"],
  input_last_image: ["Last image", "last_image_path"],
  input_video: ["Video", "video_path"],
  input_mask: ["Mask of the video", "mask_path"],
  reference_images: ["Reference images", "reference_images"],
};
const OTHER = "other";
const STORED = "maxdiffusion-form";
const EXAMPLES = {
  embedded: [
    "a red circle moves right on a white background",
    "a blue square grows on a black background",
    "a yellow triangle moves up and left on a navy background",
  ],
};
let server = null;
let videos = new Map(); // finished ones by id, newest first
let last = null; // id after which older ones follow
let active = new Set();
let opened = null;
let picked = null;
let stream = null;
let preset = null; // name of the chosen one

// Requests

async function call(method, path, body) {
  const options = { method, headers: {} };
  if (body instanceof FormData) {
    options.body = body;
  } else if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const answer = await fetch(path, options);
  if (answer.status === 401 && path !== "/v1/session") {
    askForKey();
    throw new Error("Log in first.");
  }
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error?.message ?? `The server answered ${answer.status}.`);
  return content;
}

function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.add("shown");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => $("toast").classList.remove("shown"), 2500);
}

async function attempt(action) {
  try {
    await action();
  } catch (error) {
    toast(error.message);
  }
}

function askForKey() {
  if (!$("login").open) $("login").showModal();
}

$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await call("POST", "/v1/session", { key: $("key").value });
    $("key").value = "";
    $("login").close();
    await start();
  } catch (error) {
    $("login-problem").textContent = error.message;
  }
});
$("logout").addEventListener("click", () => attempt(async () => {
  await call("DELETE", "/v1/session");
  location.reload();
}));

// Form

function buildForm() {
  const { defaults, fields, sizes } = server;
  $("prompt").maxLength = fields.prompt.maxLength;
  $("size").replaceChildren(...sizes.map((size) => {
    const [width, height, frames] = size.split("x");
    const seconds = (frames / defaults.fps).toFixed(1);
    return make("option", { value: size, text: `${width} × ${height}, ${seconds} s` });
  }));
  if (server.other_sizes) $("size").append(make("option", { value: OTHER, text: "Other size…" }));
  $("inputs").replaceChildren(...Object.keys(fields).filter((name) => name in INPUTS).map((name) => {
    const kind = (fields[name].items ?? fields[name]).contentMediaType;
    const control = make("input", { id: `file-${name}`, type: "file", "data-input": name, multiple: "items" in fields[name],
      accept: kind === "video/*" ? "video/mp4,video/webm,image/gif" : "image/png,image/jpeg,image/webp" });
    return make("label", { title: fields[name].description }, make("span", { text: INPUTS[name][0] }), control);
  }));
  const more = Object.keys(fields).filter((name) => !IN_FORM.includes(name) && !(name in INPUTS));
  $("fields").replaceChildren(...more.map((name) => field(name, fields[name])));
  $("presets").replaceChildren(...Object.entries(server.presets).map(([name, values]) =>
    make("button", { type: "button", text: name[0].toUpperCase() + name.slice(1).replaceAll("_", " "), "data-preset": name, "aria-pressed": "false",
      title: Object.entries(values).map(([field, value]) => `${field.replaceAll("_", " ")} ${value}`).join(", "), onclick: () => choose(name) })));
  const examples = EXAMPLES[server.model] ?? [defaults.prompt];
  $("examples").replaceChildren(...examples.map((text) =>
    make("button", { type: "button", text: text.length > 44 ? text.slice(0, 42) + "…" : text, title: text,
      onclick: () => { $("prompt").value = text; changed(); } })));
}

function choose(name) {
  fill({ ...read(), ...server.defaults, ...shape(), prompt: $("prompt").value, seed: $("seed").value, ...server.presets[name] });
  const levels = server.presets[name].sigmas ?? server.presets[name].denoising_step_list;
  if (levels?.length) input("num_inference_steps").value = levels.length;
  preset = name;
  changed();
}

// A preset stays chosen while the form has its values; some of them are not fields of the form.
function matches(name) {
  const values = server.presets[name];
  const hidden = Object.keys(values).some((field) => !input(field));
  return (!hidden || preset === name) && Object.entries(values).every(([field, value]) => !input(field) || Number(input(field).value) === value || input(field).value === String(value));
}

function field(name, schema) {
  const title = name.replaceAll("_", " ");
  const id = `field-${name}`;
  let control;
  if (schema.enum) {
    control = make("select", { id, name }, ...schema.enum.map((word) => make("option", { value: word, text: word })));
  } else if (schema.type === "string") {
    control = make("textarea", { id, name, rows: 2, maxlength: schema.maxLength });
  } else {
    const step = schema.type === "integer" ? 1 : "any";
    control = make("input", { id, name, type: "number", step, min: schema.minimum, max: schema.maximum });
  }
  return make("label", { class: schema.type === "string" && !schema.enum ? "wide" : "", title: schema.description },
    make("span", { text: title }), control);
}

const input = (name) => $(`field-${name}`) ?? $(name);

function fill(values) {
  for (const [name, value] of Object.entries({ ...server.defaults, priority: 0, ...values })) {
    const control = input(name);
    if (control && value != null) control.value = value;
  }
  const { width, height, num_frames: frames } = { ...server.defaults, ...values };
  const size = `${width}x${height}x${frames}`;
  const listed = server.sizes.includes(size);
  if (listed || server.other_sizes) $("size").value = listed ? size : OTHER;
  [["width", width], ["height", height], ["frames", frames]].forEach(([part, value]) => { $(`other-${part}`).value = value; });
  changed();
}

function shape() {
  const other = ["width", "height", "frames"].map((part) => $(`other-${part}`).value);
  const [width, height, frames] = ($("size").value === OTHER ? other : $("size").value.split("x")).map(Number);
  return { width, height, num_frames: frames };
}

function read() {
  const values = { prompt: $("prompt").value, seed: $("seed").value, ...shape() };
  for (const control of $("fields").querySelectorAll("[name]")) {
    if (control.value !== "" || control.tagName === "TEXTAREA") values[control.name] = control.value;
  }
  if (preset) values.preset = preset;
  return values;
}

function changed() {
  if (preset && !matches(preset)) preset = null;
  if (!preset) preset = Object.keys(server.presets).find(matches) ?? null;
  for (const button of $("presets").children) button.setAttribute("aria-pressed", String(button.dataset.preset === preset));
  $("other-size").hidden = $("size").value !== OTHER;
  try { localStorage.setItem(STORED, JSON.stringify(read())); } catch { /* private windows have no storage */ }
}

function restore() {
  let stored = {};
  try { stored = JSON.parse(localStorage.getItem(STORED)) ?? {}; } catch { /* damaged: use the defaults */ }
  preset = stored.preset in server.presets ? stored.preset : null;
  fill(stored);
}

async function submit(values) {
  $("problem").textContent = "";
  const body = { ...values };
  if (body.priority === "0" || body.priority === 0) delete body.priority;
  try {
    const chosen = [...$("inputs").querySelectorAll("input")].filter((control) => control.files.length);
    if (chosen.length) {
      const form = new FormData();
      for (const [name, value] of Object.entries(body)) form.append(name, value);
      for (const control of chosen) {
        for (const file of control.files) form.append(control.dataset.input, file);
      }
      await call("POST", "/v1/videos", form);
    } else {
      await call("POST", "/v1/videos", body);
    }
  } catch (error) {
    $("problem").textContent = error.message;
    toast(error.message);
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(read()); });
$("form").addEventListener("input", changed);
$("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("form").requestSubmit(); }
});
$("dice").addEventListener("click", () => { $("seed").value = Math.floor(Math.random() * 2 ** 32); changed(); });
$("reset").addEventListener("click", () => fill({}));

// Queue

function seconds(value) {
  if (value == null) return "";
  if (value < 90) return `${Math.ceil(value)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

function stageText(video) {
  const left = video.eta_seconds == null ? "" : ` · about ${seconds(video.eta_seconds)}`;
  if (video.reason) return video.reason;
  if (video.status === "queued") {
    return (video.queue_position ? `${video.queue_position} before it` : "next") + left;
  }
  if (video.stage === "denoising") return `step ${video.step} of ${video.steps}${left}`;
  return video.stage;
}

function jobCard(video) {
  const card = make("div", { class: "job", "data-id": video.id },
    make("img", { class: "preview", alt: "", width: 92, height: 72 }),
    make("div", { class: "text" }, make("p"), make("progress", { max: 100 }), make("span", { class: "stage" })),
    make("button", { type: "button", text: "Cancel", "aria-label": "Cancel this video",
      onclick: () => attempt(() => call("POST", `/v1/videos/${video.id}/cancel`)) }));
  return card;
}

const BLANK = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";

function updateJob(card, video) {
  card.querySelector("p").textContent = video.prompt;
  card.querySelector("progress").value = video.progress;
  card.querySelector("progress").setAttribute("aria-label", `${video.progress} percent`);
  card.querySelector(".stage").textContent = stageText(video);
  const picture = card.querySelector("img");
  const step = String(video.preview_step ?? "");
  if (picture.dataset.step !== step || !picture.src) {
    picture.dataset.step = step;
    picture.src = step ? `/v1/videos/${video.id}/preview?step=${step}` : BLANK;
  }
}

function showState(state) {
  const badge = $("ready");
  badge.textContent = state.ready ? "ready" : "starting";
  badge.className = state.ready ? "badge good" : "badge";
  const waiting = state.counts.queued + state.counts.in_progress;
  $("queue-count").textContent = waiting ? `· ${waiting}` : "";
  const cards = new Map([...$("queue").querySelectorAll(".job")].map((card) => [card.dataset.id, card]));
  const nodes = state.active.map((video) => {
    const card = cards.get(video.id) ?? jobCard(video);
    updateJob(card, video);
    return card;
  });
  if (!nodes.length) nodes.push(make("p", { class: "empty", text: "Nothing waits. Describe a video and press Make video." }));
  place($("queue"), nodes);
  const now = new Set(state.active.map((video) => video.id));
  for (const video of state.recent) {
    const known = videos.get(video.id);
    if (!known || known.status !== video.status) videos = new Map([[video.id, video], ...videos]);
  }
  for (const id of active) {
    if (!now.has(id) && !videos.has(id)) attempt(async () => { add(await call("GET", `/v1/videos/${id}`)); showVideos(); });
  }
  active = now;
  showVideos();
}

function add(video) {
  if (video.status === "completed" || video.status === "failed") videos.set(video.id, video);
}

// Keeps nodes that stay, so that nothing flickers and no video starts again.
function place(parent, nodes) {
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  while (parent.children.length > nodes.length) parent.lastElementChild.remove();
}

// Gallery

function facts(video) {
  const took = video.timings?.denoise_seconds;
  return { ...video.settings, size: video.size, seconds: video.seconds, created: new Date(video.created_at * 1000).toLocaleString(),
    ...(took ? { "denoise seconds": took.toFixed(1) } : {}), ...(video.remixed_from_video_id ? { "remix of": video.remixed_from_video_id } : {}), id: video.id };
}

function videoCard(video) {
  const screen = video.status === "completed"
    ? make("video", { muted: true, loop: true, playsinline: true, preload: "none", poster: `/v1/videos/${video.id}/content?variant=thumbnail`,
      src: `/v1/videos/${video.id}/content` })
    : make("div", { class: "failed", text: video.error.code === "cancelled" ? "cancelled" : video.error.message });
  const card = make("button", { type: "button", class: "video", "data-id": video.id, "data-status": video.status, title: video.prompt,
    onclick: () => open(videos.get(video.id)) }, screen,
    make("span", { class: "caption" }, make("p", { text: video.prompt }),
      make("small", { text: `${video.size} · ${video.steps} steps · seed ${video.settings.seed}` })));
  if (video.status === "completed") {
    screen.muted = true;
    for (const begin of ["mouseenter", "focus"]) card.addEventListener(begin, () => screen.play().catch(() => {}));
    for (const end of ["mouseleave", "blur"]) card.addEventListener(end, () => screen.pause());
  }
  return card;
}

function showVideos() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (video) => `${video.prompt} ${Object.entries(facts(video)).flat().join(" ")}`.toLowerCase();
  const shown = [...videos.values()].filter((video) => words.every((word) => text(video).includes(word)))
    .sort((one, other) => other.created_at - one.created_at || (other.started_at ?? 0) - (one.started_at ?? 0) || (one.id < other.id ? 1 : -1));
  const cards = new Map([...$("videos").querySelectorAll(".video")].map((card) => [card.dataset.id, card]));
  const nodes = shown.map((video) => {
    const card = cards.get(video.id);
    const node = card?.dataset.status === video.status ? card : videoCard(video);
    node.classList.toggle("picked", picked?.id === video.id);
    return node;
  });
  if (!nodes.length) nodes.push(make("p", { class: "empty", text: words.length ? "No video matches." : "Finished videos appear here." }));
  place($("videos"), nodes);
}

async function loadOlder() {
  const page = await call("GET", `/v1/videos?limit=40${last ? `&after=${last}` : ""}`);
  page.data.forEach(add);
  last = page.last_id ?? last;
  $("older").hidden = !page.has_more;
  showVideos();
}

$("search").addEventListener("input", showVideos);
$("older").addEventListener("click", () => attempt(loadOlder));

// One video

function rows(table, entries) {
  table.replaceChildren(...entries.map(([name, ...values]) => make("tr", {}, make("th", { text: name.replaceAll("_", " ") }),
    ...values.map((value) => make("td", { text: String(value ?? "") })))));
}

function open(video) {
  if (picked && picked.id !== video.id && video.status === "completed") {
    compare(picked, video);
    picked = null;
    showVideos();
    return;
  }
  opened = video;
  const done = video.status === "completed";
  $("detail-title").textContent = video.prompt;
  $("detail-video").hidden = !done;
  for (const id of ["download", "compare-this"]) $(id).hidden = !done;
  if (done) {
    $("detail-video").src = $("download").href = `/v1/videos/${video.id}/content`;
    $("detail-video").play().catch(() => {});
  }
  rows($("facts"), Object.entries({ ...(video.error ? { error: video.error.message } : {}), ...facts(video) }));
  $("detail").showModal();
}

// Settings as keys of a config; files and strengths of adapters have no value there.
function keys(video) {
  const values = { prompt: video.prompt };
  const notes = [];
  for (const [name, value] of Object.entries(video.settings)) {
    if (name in INPUTS) values[INPUTS[name][1]] = Array.isArray(value) ? value.map(() => "FILE") : "FILE";
    else if (name.startsWith("lora_")) notes.push(`${name}: ${value}`);
    else values[name] = value;
  }
  return [values, notes];
}

function command(video) {
  const quote = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;
  const text = (value) => (Array.isArray(value) ? JSON.stringify(value) : String(value));
  const [values, notes] = keys(video);
  const parts = Object.entries(values).map(([name, value]) => `${name}=${/^[\w.+-]+$/.test(text(value)) ? text(value) : quote(text(value))}`);
  return `python -m maxdiffusion.generate_wan CONFIG ${parts.join(" ")}${notes.length ? `  # ${notes.join(", ")}` : ""}`;
}

function yaml(video) {
  const [values, notes] = keys(video);
  const lines = Object.entries(values).map(([name, value]) => `${name}: ${JSON.stringify(value)}`);
  return [...notes.map((note) => `# ${note}`), ...lines].join("\n") + "\n";
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not offered without https
    const area = make("textarea", { class: "skip" });
    area.value = text;
    $("detail").append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(`${what} copied`);
}

const again = (change) => {
  const { prompt, settings } = opened;
  const seed = (settings.seed + change) % 2 ** 32;
  $("detail").close();
  // The files of a video are known to the server alone, and some values come from presets only.
  if (Object.keys(settings).some((name) => name in INPUTS || !(name in server.fields))) {
    attempt(() => call("POST", `/v1/videos/${opened.id}/remix`, { prompt, seed }));
  } else {
    submit({ prompt, ...settings, seed });
  }
};
$("again").addEventListener("click", () => again(0));
$("next").addEventListener("click", () => again(1));
$("edit").addEventListener("click", () => { fill({ prompt: opened.prompt, ...opened.settings }); $("detail").close(); $("prompt").focus(); });
$("copy-command").addEventListener("click", () => copy(command(opened), "Command"));
$("copy-yaml").addEventListener("click", () => copy(yaml(opened), "YAML"));
$("compare-this").addEventListener("click", () => {
  picked = opened;
  $("detail").close();
  showVideos();
  toast("Choose the other video");
});
$("delete").addEventListener("click", () => attempt(async () => {
  await call("DELETE", `/v1/videos/${opened.id}`);
  videos.delete(opened.id);
  $("detail").close();
  showVideos();
}));
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close")?.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog && dialog.id !== "login") dialog.close(); });
  dialog.addEventListener("close", () => dialog.querySelectorAll("video").forEach((video) => video.pause()));
}

// Compare

let following = 0;

function compare(one, other) {
  for (const [id, video] of [["left", one], ["right", other]]) $(id).src = `/v1/videos/${video.id}/content`;
  const names = [...new Set([...Object.keys(facts(one)), ...Object.keys(facts(other))])];
  const values = names.map((name) => [name, facts(one)[name], facts(other)[name]]).filter(([, a, b]) => a !== b);
  rows($("differences"), [["prompt", one.prompt, other.prompt], ...values]);
  $("compare").showModal();
  $("play").textContent = "Pause";
  $("left").play().catch(() => {});
  $("right").play().catch(() => {});
  follow();
}

// The right video follows the time of the left one.
function follow() {
  cancelAnimationFrame(following);
  if (!$("compare").open) return;
  const gap = Math.abs($("left").currentTime - $("right").currentTime);
  if (gap > 0.08 && !$("right").seeking) $("right").currentTime = $("left").currentTime;
  following = requestAnimationFrame(follow);
}
$("wipe").addEventListener("input", () => $("compare").style.setProperty("--wipe", `${$("wipe").value}%`));
$("play").addEventListener("click", () => {
  const paused = $("left").paused;
  for (const id of ["left", "right"]) paused ? $(id).play() : $(id).pause();
  $("play").textContent = paused ? "Pause" : "Play";
});
$("swap").addEventListener("click", () => {
  [$("left").src, $("right").src] = [$("right").src, $("left").src];
  for (const id of ["left", "right"]) $(id).play().catch(() => {});
});

// Plan

const SVG = "http://www.w3.org/2000/svg";
function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function drawPlan(plan) {
  const shown = Math.min(plan.devices, 64);
  const columns = Math.min(8, shown);
  const lines = Math.ceil(shown / columns);
  const side = 44, top = 40, left = (640 - columns * (side + 8)) / 2, below = top + lines * (side + 8) + 20;
  const svg = draw("svg", { viewBox: `0 0 640 ${below + 150}`, role: "img", "aria-label": "Mesh and attention" });
  const axes = Object.entries(plan.mesh).filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`).join(" × ");
  svg.append(draw("text", { x: 320, y: 22 }, `${plan.devices} × ${plan.device}${axes ? `: ${axes}` : ""}`));
  for (let index = 0; index < shown; index++) {
    const x = left + (index % columns) * (side + 8), y = top + Math.floor(index / columns) * (side + 8);
    svg.append(draw("rect", { x, y, width: side, height: side, rx: 7, class: "device" }), draw("text", { x: x + side / 2, y: y + side / 2 + 5 }, index));
  }
  const boxes = [["tokens", plan.tokens.toLocaleString()], ["context", plan.scheme], ["kernel", plan.kernel]];
  boxes.forEach(([name, value], index) => {
    const x = 8 + index * 212, y = below + 10;
    svg.append(draw("rect", { x, y, width: 200, height: 66, rx: 10, class: "box" }), draw("text", { x: x + 100, y: y + 24, class: "note" }, name),
      draw("text", { x: x + 100, y: y + 47 }, value.length > 27 ? value.slice(0, 26) + "…" : value));
    if (index) svg.append(draw("path", { d: `M ${x - 12} ${y + 33} h 10`, class: "arrow" }));
  });
  const runs = plan.runs === plan.attention ? plan.attention : `${plan.attention}, runs as ${plan.runs}`;
  svg.append(draw("text", { x: 320, y: below + 110, class: "note" }, `attention: ${runs}`));
  $("drawing").replaceChildren(svg);
  $("plan-text").textContent = plan.text;
}
$("show-plan").addEventListener("click", () => $("plan").showModal());

// Keyboard: / searches, n begins a prompt.
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, textarea, select") || document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey) return;
  if (event.key === "/") { event.preventDefault(); $("search").focus(); }
  if (event.key === "n") { event.preventDefault(); $("prompt").focus(); }
});

// Start

function connect() {
  stream?.close();
  stream = new EventSource("/v1/events");
  stream.addEventListener("state", (event) => showState(JSON.parse(event.data)));
  stream.onerror = () => { $("ready").textContent = "not connected"; $("ready").className = "badge bad"; };
}

async function start() {
  server = await call("GET", "/v1/server");
  $("model").textContent = server.model;
  $("logout").hidden = !server.keys;
  buildForm();
  restore();
  $("controls").disabled = false; // until here nothing is known that its values could be checked against
  drawPlan(server.plan);
  await loadOlder();
  connect();
}
start().catch((error) => { $("problem").textContent = error.message; });
