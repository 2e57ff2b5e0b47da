// The page: its state, which the link holds, and what Python answers for it.
import {Drawing} from "./drawing.js";
import {Editor} from "./editor.js";
import {Python, Refused} from "./python.js";
import {Words} from "./strings.js";

const $ = id => document.getElementById(id);
const DEFAULTS = {schedule: "1f1b", ranks: "4", microbatches: "8", chunks: "", slices: "", update_every: "", warmup: "", limit: "",
  forward: "1", input: "1", weight: "1", transfer: "0", step: "0", activation: "1", version: "0"};
const SLIDERS = {forward: [0.1, 4, 0.1], input: [0, 4, 0.1], weight: [0, 4, 0.1], transfer: [0, 2, 0.05],
  step: [0, 4, 0.1], activation: [0, 4, 0.1], version: [0, 4, 0.1]};
const PLAYED_MS = 14000; // from the first start to the last end

const python = new Python(), drawing = new Drawing();
let words, catalog = [];
let settings = {...DEFAULTS}, text = null, moment = 0, language = "en"; // the state; text: edited actions
const rows = new Map();
let drawn = null, playing = 0, comparison = 0;

const node = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const short = value => String(Number(value.toPrecision(6)));

// -- the link -----------------------------------------------------------------------------------------

function readLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  settings = Object.fromEntries(Object.entries(DEFAULTS).map(([key, value]) => [key, link.get(key) ?? value]));
  text = link.get("text");
  moment = Math.max(0, Number.parseInt(link.get("t"), 10) || 0);
  language = link.get("lang") || (navigator.language.startsWith("zh") ? "zh" : "en");
}

function writeLink() {
  const link = new URLSearchParams(Object.entries(settings).filter(([key, value]) => value !== DEFAULTS[key]));
  if (moment) link.set("t", moment);
  if (text !== null) link.set("text", text);
  link.set("lang", words.language);
  history.replaceState(null, "", `#${link}`);
}

// -- what Python answers --------------------------------------------------------------------------------

let wanted = false, asking = false;

// Asks for what the state says. While an answer is under way only the newest state waits.
async function refresh() {
  writeLink();
  wanted = true;
  if (asking) return;
  asking = true;
  $("status").textContent = words.working;
  while (wanted) {
    wanted = false;
    comparison += 1;
    try {
      if (text === null || !drawn) accept(await python.ask("draw", {settings}));
      if (text !== null) judge(await python.ask("check", {settings, text}));
    } catch (error) {
      refuse(error);
    }
  }
  asking = false;
  document.body.dataset.state = "ready";
  compareAll(comparison);
}

function accept(answer) {
  drawn = answer;
  $("error").hidden = true;
  $("verdict").replaceChildren();
  $("verdict").className = "";
  new_drawing();
  if (text === null) editor.value = drawn.csv; // nobody has edited it meanwhile
}

function judge({problems, marks, verdict, drawn: passed, command}) {
  editor.value = text;
  const box = $("verdict");
  $("error").hidden = true;
  box.className = problems ? "bad" : "good";
  if (problems) {
    editor.mark(marks);
    box.replaceChildren(...problems.map(problemNode));
    $("drawing").classList.add("before");
    $("status").textContent = drawn ? words.unused : "";
    showCommand(command);
  } else {
    box.replaceChildren(node("pre", {}, verdict.trimEnd()));
    drawn = passed;
    new_drawing();
  }
  $("goto").hidden = !problems || !marks.length;
  $("revert").hidden = false;
}

function refuse(error) {
  const problems = error instanceof Refused ? error.problems : [{what: `the page failed: ${error.message}`, hint: "reload it"}];
  $("error").replaceChildren(...problems.map(problemNode));
  $("error").hidden = false;
  $("drawing").classList.add("before");
  $("status").textContent = drawn ? words.unused : "";
}

// A mistake: its first line, the checker's grid with what is marked, the hint.
function problemNode({what, hint, where}) {
  const [first, ...grid] = what.split("\n");
  const made = node("div", {}, node("p", {class: "what"}, first + (where ? ` (${where})` : "")));
  if (grid.length) {
    const lines = node("pre");
    for (const line of grid) {
      const at = line.indexOf("<-- here"), from = at < 0 ? -1 : line.lastIndexOf(" ", at - 2) + 1;
      if (at < 0) lines.append(line, "\n");
      else lines.append(line.slice(0, from), node("mark", {}, line.slice(from, at + 8)), line.slice(at + 8), "\n");
    }
    made.append(lines);
  }
  made.append(node("p", {class: "hint"}, words.hint + hint));
  return made;
}

// -- the drawing, its figures, its time ----------------------------------------------------------------

function new_drawing() {
  $("drawing").classList.remove("before");
  $("status").textContent = words.ready;
  $("goto").hidden = true;
  $("revert").hidden = text === null;
  drawing.show(drawn, words);
  $("name").textContent = drawn.name;
  $("sizes").textContent = words.sizes(drawn);
  showCommand(drawn.command);
  form.elements.update_every.placeholder = drawn.update_every ?? "";
  $("time").max = drawn.moments.length - 1;
  const most = key => Math.max(...drawn.stages.map(stage => stage[key]));
  const count = drawn.per_step === 1 ? words.one_microbatch : words.fill("microbatches_count", {count: drawn.per_step});
  const cards = [
    ["bubble", drawn.bubble, words.fill(drawn.flush ? "bubble_sub" : "bubble_once", drawn)],
    ["period", drawn.period, words.fill(drawn.flush ? "period_sub" : "period_steady", {count, each: drawn.per_microbatch})],
    ["peak", drawn.peak, words.peak_sub],
    ["versions", most("versions"), words.versions_sub],
    ["staleness", most("staleness"), words.staleness_sub],
    ["makespan", drawn.makespan, words.makespan_sub]];
  $("cards").replaceChildren(...cards.map(([key, value, sub]) => node("div", {class: "card"}, node("dt", {}, words[key]),
    node("dd", {class: "big", id: `figure-${key}`}, String(value)), node("dd", {class: "sub"}, sub))));
  moveTo(moment, false);
}

function showCommand(command) {
  $("command").textContent = command + (text === null ? "" : `   # ${words.edited_command}`);
}

function moveTo(index, follow = true) {
  if (!drawn) return;
  moment = Math.min(Math.max(0, index), drawn.moments.length - 1);
  const time = drawn.moments[moment], clock = words.fill("clock", {time: short(time), end: short(drawn.end)});
  $("time").value = moment;
  $("time").setAttribute("aria-valuetext", clock);
  $("clock").textContent = clock;
  $("now-time").textContent = words.fill("now_at", {time: short(time)});
  drawing.moveTo(time, follow);
  showNow(time);
}

function showNow(time) {
  const halves = drawn.ranks.some(rank => rank.halves);
  const heads = ["rank", "doing", "until", "held", "peak_memory", "peak_activations", ...halves ? ["weight_halves"] : [],
    "stage", "versions", "staleness", "waits"];
  const body = drawing.doing(time).map(({name, events, held}, number) => {
    const rank = drawn.ranks[number], last = events.at(-1);
    const stages = drawn.stages.map((stage, index) => ({...stage, index})).filter(stage => stage.ranks.includes(number));
    const each = key => stages.map(stage => stage[key]).join(" ");
    const does = events.length ? events.flatMap(([action, op, , , version], index) => [index ? " " : "",
      node("span", {class: `doing op-${op}`}, action), version === null ? "" : ` ${words.fill("version_used", {version})}`])
      : [node("span", {class: "doing"}, words.idle)];
    const cells = [last ? short(last[3]) : "", short(held), rank.peak, rank.activations, ...halves ? [rank.halves] : [],
      each("index"), each("versions"), each("staleness"), rank.idle];
    return node("tr", {}, node("th", {scope: "row"}, name), node("td", {class: "left"}, ...does),
      ...cells.map(cell => node("td", {}, String(cell))));
  });
  $("now").replaceChildren(tableHead(heads, ["doing"]), node("tbody", {}, ...body));
}

const tableHead = (keys, left = []) => node("thead", {}, node("tr", {}, ...keys.map(key =>
  node("th", {scope: "col", class: left.includes(key) ? "left" : null}, words[key]))));

function step(by) {
  pause();
  moveTo(moment + by);
  writeLink();
  const now = drawn ? drawing.doing(drawn.moments[moment]) : [];
  $("say").textContent = now.map(({name, events}) => `${name}: ${events.map(([action]) => action).join(" ") || words.idle}`).join("; ");
}

function play() {
  if (playing || !drawn) return pause();
  if (moment >= drawn.moments.length - 1) moveTo(0);
  const next = () => {
    const gap = drawn.moments[moment + 1] - drawn.moments[moment];
    playing = setTimeout(() => {
      moveTo(moment + 1);
      if (moment >= drawn.moments.length - 1) pause();
      else next();
    }, Math.min(800, Math.max(60, gap / drawn.end * PLAYED_MS)));
  };
  next();
  label($("play"), "pause", "❚❚");
}

function pause() {
  clearTimeout(playing);
  playing = 0;
  label($("play"), "play", "▶︎");
  if (drawn) writeLink();
}

function label(button, key, sign) {
  button.textContent = sign;
  button.setAttribute("aria-label", words[key]);
  button.title = words[key];
}

// -- the comparison -------------------------------------------------------------------------------------

// Asks for one schedule after the other, as long as the state stays the same.
async function compareAll(number) {
  for (const {name} of catalog) {
    let row;
    try {
      row = await python.ask("compare", {settings, name});
    } catch (error) {
      row = {name, order: [Infinity, 0, name], reason: error.problems ? error.problems[0].what : error.message};
    }
    if (number !== comparison) return;
    rows.set(name, row);
    showComparison();
  }
  document.body.dataset.compared = number;
}

function showComparison() {
  const heads = ["schedule", "stages_per_rank", "bubble", "share", "makespan", "period_each", "peak_activations",
    "versions", "staleness"];
  const inOrder = [...rows.values()].sort(({order: one}, {order: other}) =>
    one[0] - other[0] || one[1] - other[1] || (one[2] < other[2] ? -1 : 1));
  $("compare").replaceChildren(tableHead(heads), node("tbody", {}, ...inOrder.map(row => {
    const choose = node("button", {type: "button", class: "link"}, row.name);
    choose.addEventListener("click", () => {
      change({schedule: row.name}, true);
      $("name").scrollIntoView({block: "center"});
    });
    const first = node("th", {scope: "row"}, choose, row.flush === false ? node("span", {class: "quiet"}, ` ${words.no_flush}`) : "");
    return node("tr", {class: row.name === settings.schedule && text === null ? "chosen" : null}, first,
      ...row.reason ? [node("td", {colspan: heads.length - 1, class: "reason"}, row.reason)]
        : row.cells.map(cell => node("td", {}, cell === "once" ? words.once : cell)));
  })));
}

// -- settings -------------------------------------------------------------------------------------------

const form = $("settings");

// Takes new settings; the edited actions stay, unless the settings are of the schedule itself.
function change(values, own) {
  pause();
  Object.assign(settings, values);
  if (own) {
    text = null;
    moment = 0;
    forgetWhatDoesNotFit();
  }
  showSettings();
  refresh();
}

function forgetWhatDoesNotFit() {
  const fits = fitting();
  for (const key of Object.keys(fits)) if (!fits[key]) settings[key] = "";
}

function fitting() {
  const recipe = catalog.find(one => one.name === settings.schedule);
  return recipe ? {chunks: recipe.any_chunks, slices: recipe.sliced, update_every: !recipe.flush, warmup: recipe.any_warmup, limit: recipe.searched} : {};
}

function showSettings() {
  const recipe = catalog.find(one => one.name === settings.schedule);
  for (const input of form.elements) if (input.name in settings) input.value = settings[input.name];
  for (const [key, fits] of Object.entries(fitting()))
    form.querySelector(`[data-for=${key}]`).hidden = !fits && !settings[key]; // a link may have what does not fit
  form.elements.chunks.placeholder = recipe ? (recipe.searched ? "1, 2" : recipe.chunks) : "";
  form.elements.warmup.placeholder = Array.from({length: Math.min(8, Number(settings.ranks) || 0)}, (_, rank) => settings.ranks - 1 - rank).join(",");
  $("about").textContent = recipe ? words.about(recipe) : "";
  for (const key in SLIDERS) $(`value-${key}`).textContent = settings[key];
}

function showWords() {
  words = new Words(language);
  document.documentElement.lang = words.language === "zh" ? "zh-CN" : "en";
  document.title = words.title;
  for (const one of document.querySelectorAll("[data-t]")) one.textContent = words[one.dataset.t];
  for (const one of document.querySelectorAll("[data-l]")) {
    const key = one.dataset.l === "forward" ? "forward_step" : one.dataset.l;
    one.setAttribute("aria-label", words[key]);
    if (one.tagName === "BUTTON") one.title = words[key];
  }
  $("scroll").setAttribute("aria-label", words.drawing);
  $("language").textContent = words.language === "zh" ? "English" : "中文";
  $("language").lang = words.language === "zh" ? "en" : "zh";
  $("link").title = words.copy_link;
  showTheme();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
const showTheme = () => { $("theme").textContent = isDark() ? words.light : words.dark; };

function makeSliders() {
  for (const [key, [min, max, step]] of Object.entries(SLIDERS))
    $("sliders").append(node("label", {for: `cost-${key}`}, node("span", {"data-t": key}), // else it labels the output
      node("output", {id: `value-${key}`}), node("input", {id: `cost-${key}`, name: key, type: "range", min, max, step})));
  $("costs").open = matchMedia("(min-width: 861px)").matches;
}

// -- what people do -------------------------------------------------------------------------------------

let typing = 0;
const editor = new Editor(value => {
  text = value;
  clearTimeout(typing);
  typing = setTimeout(refresh, 250);
});

for (const kind of ["input", "change"]) // programs that fill in a form may send the second alone
  form.addEventListener(kind, ({target}) => {
    const value = target.value.trim();
    if (target.name in settings && settings[target.name] !== value) change({[target.name]: value}, !(target.name in SLIDERS));
  });
form.addEventListener("submit", event => event.preventDefault());
$("reset").addEventListener("click", () =>
  change(Object.fromEntries(Object.keys(SLIDERS).map(key => [key, DEFAULTS[key]])), false));
$("first").addEventListener("click", () => step(-moment));
$("back").addEventListener("click", () => step(-1));
$("forward").addEventListener("click", () => step(1));
$("play").addEventListener("click", play);
for (const kind of ["input", "change"])
  $("time").addEventListener(kind, ({target}) => { if (Number(target.value) !== moment) step(target.value - moment); });
$("goto").addEventListener("click", () => editor.goto());
$("revert").addEventListener("click", () => {
  text = null;
  refresh();
});
$("scroll").addEventListener("click", ({clientX}) => {
  const time = drawing.timeAt(clientX);
  if (time === null) return;
  const after = drawn.moments.findIndex(one => one > time);
  step((after < 0 ? drawn.moments.length : after) - 1 - moment);
});
$("language").addEventListener("click", () => {
  language = words.language === "zh" ? "en" : "zh";
  showWords();
  showSettings();
  if (drawn) new_drawing();
  refresh();
});
$("theme").addEventListener("click", () => {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.style.colorScheme);
  showTheme();
});
dark.addEventListener("change", showTheme);
$("link").addEventListener("click", async () => {
  writeLink();
  await navigator.clipboard.writeText(location.href).catch(() => prompt(words.copy_link, location.href));
  $("link").textContent = words.copied;
  setTimeout(() => { $("link").textContent = words.link; }, 1500);
});
const KEYS = {ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => step(-moment), End: () => step(Infinity), " ": play};
document.addEventListener("keydown", event => {
  const {target, key} = event;
  if (!(key in KEYS) || event.ctrlKey || event.altKey || event.metaKey || target.closest("input, select, textarea, summary")) return;
  if (key === " " && target.closest("button")) return;
  event.preventDefault();
  KEYS[key]();
});
addEventListener("hashchange", () => {
  readLink();
  showWords();
  showSettings();
  refresh();
});

// -- the start ------------------------------------------------------------------------------------------

document.documentElement.style.colorScheme = localStorage.getItem("theme") || "";
makeSliders();
readLink();
showWords();
showSettings();
label($("play"), "play", "▶︎");
$("status").textContent = words.starting;
try {
  await python.ready;
  const {schedules, most} = await python.ask("catalog");
  catalog = schedules;
  for (const [name, number] of Object.entries(most)) form.elements[name].max = number;
  form.elements.schedule.append(...catalog.map(({name}) => node("option", {value: name}, name)));
  showSettings();
  await refresh();
} catch (error) {
  refuse(error);
  document.body.dataset.state = "failed";
}
