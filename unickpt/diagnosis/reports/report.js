"use strict";
// Draws the page from the JSON beside it. Everything that comes from there is put in as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page"), tip = document.getElementById("tip");
const dark = matchMedia("(prefers-color-scheme: dark)");
const painters = []; // drawn again when the width or the colours change
const RAMPS = [["#fff7d6", "#fed976", "#fd8d3c", "#d7191c", "#6b0020"], ["#221a3a", "#5b1a78", "#b63655", "#f5850f", "#fbf7a0"]];
const KINDS = ["", "#7fb2dd", "#2a9d6f", "#f0a020", "#c56aa8", "#c8321f", "#5560c8"]; // as KINDS in timeline.py

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
function add(parent, name, className, text) { return parent.appendChild(element(name, className, text)); }
function count(number, one, many) { return number.toLocaleString("en") + " " + (number === 1 ? one : many || one + "s"); }
function time(ns) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (ns >= size) return (ns / size).toFixed(ns / size < 10 ? 2 : ns / size < 100 ? 1 : 0) + " " + unit;
  }
  return Math.round(ns) + " ns";
}
function bytes(size) {
  let at = 0;
  for (; size >= 1024 && at < 5; at++) size /= 1024;
  return (at && size < 10 ? size.toFixed(1) : Math.round(size)) + " " + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][at];
}
function clock(ms) { return new Date(ms).toISOString().replace("T", " ").slice(0, 19) + " UTC"; }
function decoded(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }
function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function section(title, caption) {
  const made = add(page, "section");
  add(made, "h2", "", title);
  add(made, "p", "caption", caption);
  return made;
}
function ramp(share) {
  const stops = RAMPS[dark.matches ? 1 : 0], at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), 3);
  const part = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  const mix = [0, 1, 2].map((i) => Math.round(part(stops[low], i) + (part(stops[low + 1], i) - part(stops[low], i)) * (at - low)));
  return mix;
}
function rgb(mix) { return "rgb(" + mix.join(",") + ")"; }
function canvas(parent, label) {
  const made = add(parent, "canvas");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  return made;
}
function context(target, width, height) {
  const scale = window.devicePixelRatio || 1;
  target.width = Math.round(width * scale);
  target.height = Math.round(height * scale);
  target.style.width = width + "px";
  target.style.height = height + "px";
  const made = target.getContext("2d");
  made.scale(scale, scale);
  made.font = "12px system-ui, sans-serif";
  made.fillStyle = style("--soft");
  return made;
}
function hover(target, told) {
  target.addEventListener("mousemove", (event) => {
    const box = target.getBoundingClientRect(), text = told(event.clientX - box.left, event.clientY - box.top);
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.max(Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), 4) + "px";
    tip.style.top = Math.max(Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8), 4) + "px";
  });
  target.addEventListener("mouseleave", () => { tip.style.display = "none"; });
}
function choice(parent, label, options) { // [value, text]
  const holder = add(parent, "label", "", label + " ");
  const made = add(holder, "select");
  for (const [value, text] of options) add(made, "option", "", text).value = value;
  made.addEventListener("change", () => paint());
  return made;
}
function scaleKey(parent) {
  const holder = add(parent, "span", "key"), low = add(holder, "span", "soft", "0");
  const bar = canvas(holder, "colour scale"), high = add(holder, "span", "soft"), none = add(parent, "span", "key");
  add(none, "i").style.background = "var(--none)";
  add(none, "span", "soft", "not known");
  return (top, open, shows) => {
    const pen = context(bar, 140, 12);
    for (let x = 0; x < 140; x++) { pen.fillStyle = rgb(ramp(x / 139)); pen.fillRect(x, 0, 1, 12); }
    high.textContent = (shows || time)(top) + (open ? " and more" : "");
    low.textContent = "0";
  };
}
function paint() { for (const each of painters) each(); }
function place(rank) { return "rank " + rank + (data.places[rank] ? " (" + data.places[rank] + ")" : ""); }
function every(size, least) { // how many of so large cells there are from one label to the next
  for (const step of [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]) if (step * size >= least) return step;
  return 2000;
}

function heading() {
  document.title = "unickpt report: " + data.job;
  add(page, "h1", "", "Job " + data.job);
  if (!data.world) { add(page, "p", "note", "No rings were given: only the rounds of the job are shown."); return; }
  const known = Object.keys(data.places).length, parts = [];
  parts.push(known.toLocaleString("en") + " of " + count(data.world, "rank"), data.host ? "host " + data.host : count(data.hosts, "host"));
  if (data.steps) parts.push("steps " + data.steps[0] + " to " + data.steps[1]);
  parts.push(count(data.records, "record"), "read " + clock(data.read_ms));
  add(page, "p", "soft", parts.join(" · "));
  if (Object.values(data.places).some((text) => / (tp|pp|dp|cp|ep|sp) /.test(text))) {
    add(page, "p", "note", "tp, pp, dp, cp, ep and sp: a rank's number in its tensor, pipeline, data, context, expert and sequence parallel group, as far as it has called it.");
  }
  if (data.missing) add(page, "p", "note", "No rings were given of rank " + data.missing + ".");
  for (const problem of data.unreadable) add(page, "p", "note", problem);
}

function verdicts() {
  const box = section("Verdicts", "What unickpt diagnose says of these records.");
  for (const verdict of data.verdicts) {
    const line = add(box, "div", "verdict");
    const where = (verdict.ranks ? ", rank " + verdict.ranks : "") + (verdict.hosts.length ? " on " + verdict.hosts.join(", ") : "");
    add(line, "b", "", verdict.syndrome[0].toUpperCase() + verdict.syndrome.slice(1) + where);
    add(line, "div", "note", verdict.meaning);
    const facts = [["since", verdict.since], ["at", verdict.at], ["the others wait at", verdict.waits_at]];
    add(line, "div", "", facts.filter(([, value]) => value).map(([name, value]) => name + " " + value).join(", "));
    add(line, "div", "", verdict.sentence);
    if (verdict.next) add(line, "div", "", "Next: " + verdict.next);
    add(line, "div", "line", verdict.line);
  }
  const more = data.verdicts_in_all - data.verdicts.length;
  if (more > 0) add(box, "p", "note", count(more, "more verdict") + " not shown.");
  if (!data.verdicts.length) add(box, "div", "sound", "No verdict: no call goes on for longer than calls of this job may take, and no rank is slower than its like in most steps.");
}

function waiting() {
  const box = section("Who waits for whom now", "A row for each rank" + (Object.keys(data.places).length > 32 ? " that others wait for, and for each call that ranks wait in" : data.waiting.plain ? " that waits, or that others wait for" : "") +
    ", at the moment of reading; arrows lead from those that wait to those that they wait for. Red: others wait for it, and it is in no call itself.");
  const graph = add(add(box, "div", "scroll"), "div");
  graph.id = "graph";
  const table = add(graph, "table"), head = add(table, "tr");
  for (const name of ["rank", "does", "waits for", "how long"]) add(head, "th", "", name);
  const rows = data.waiting.rows.map((row) => {
    const line = add(table, "tr"), first = add(line, "td");
    add(first, "span", row.kind, (row.count > 1 ? count(row.count, "rank") : "rank " + row.ranks));
    if (row.place) add(first, "div", "soft", row.place);
    add(line, "td", "", row.what + (row.count > 1 ? ": ranks " + row.ranks : ""));
    add(line, "td", "", row.for ? "rank " + row.for : row.kind === "waits" ? "nobody: all have entered" : "");
    add(line, "td", "", row.since === null ? "" : time(row.since));
    return line;
  });
  const notes = [];
  if (!rows.length) notes.push("Nobody waited in a call.");
  if (data.waiting.plain) notes.push(count(data.waiting.plain, "rank") + " that waited in no call and that nobody waited for: no row.");
  if (data.waiting.cut) notes.push(count(data.waiting.cut, "row") + " not shown: those with the fewest waiting ranks.");
  for (const note of notes) add(box, "p", "note", note);
  const space = "http://www.w3.org/2000/svg", drawing = graph.appendChild(document.createElementNS(space, "svg"));
  painters.push(() => {
    drawing.replaceChildren();
    const middle = (row) => row.offsetTop + table.offsetTop + row.offsetHeight / 2;
    drawing.setAttribute("width", 74);
    drawing.setAttribute("height", graph.offsetHeight);
    const draw = (name, values) => {
      const made = drawing.appendChild(document.createElementNS(space, name));
      for (const key in values) made.setAttribute(key, values[key]);
    };
    data.waiting.rows.forEach((row, at) => row.to.forEach((to) => {
      if (to === at) return;
      const from = middle(rows[at]), end = middle(rows[to]), deep = 12 + Math.min(48, 9 * Math.abs(to - at));
      draw("path", { d: `M62 ${from} C${62 - 1.33 * deep} ${from} ${62 - 1.33 * deep} ${end} 56 ${end}`, fill: "none", stroke: style("--warn"), "stroke-width": 1.5, opacity: 0.8 });
      draw("path", { d: `M64 ${end} l-10 -5 v10 z`, fill: style(data.waiting.rows[to].kind === "held" ? "--bad" : "--warn") });
    }));
    data.waiting.rows.forEach((row, at) => {
      const colour = style({ held: "--bad", waits: "--warn", runs: "--good" }[row.kind]);
      draw("circle", { cx: 67, cy: middle(rows[at]), r: 4.5, fill: colour });
    });
  });
}

function heat() {
  const box = section("Rank by step", "Rows are ranks, columns are steps. A rank that stands out in lateness keeps the others waiting. Own time, waits for data and garbage collection show what with.");
  if (!Object.keys(data.heat.measures).length) { add(box, "p", "note", "There are no collectives of several ranks and no steps in the records."); return; }
  heatMap(box, data.heat, {
    behind_first: "lateness: after the first member of the group, latest arrival of the step",
    behind_median: "lateness: after the median member of the group, latest arrival of the step",
    own: "own time of the step: not waiting in calls", waiting: "time of the step spent waiting in calls",
    data: "waits for data in the step", garbage: "garbage collection in the step",
  }, () => time);
}

function memory() {
  const tier = data.memory;
  if (!tier) return;
  const box = section("Checkpoints in memory", "Held bytes include the copies of other hosts' files. A checkpoint is confirmed when each of its files has its copies.");
  const newest = add(box, "p", "");
  newest.id = "memory";
  newest.textContent = tier.generation
    ? "Newest confirmed: step " + tier.step + ", generation g" + tier.generation + ", " + seconds(tier.age_s) + " old, confirmed after " + seconds(tier.confirm_s) + " (longest " + seconds(tier.longest_s) + ")."
    : "No checkpoint in memory was confirmed.";
  add(box, "p", "", tier.confirmed + " confirmed, " + tier.uncopied + " without copies, " + tier.failed + " failed, " + tier.skipped + " to disk after a failure.");
  const table = add(box, "table"), head = add(table, "tr");
  for (const name of ["host", "first rank", "held", "connections refused"]) add(head, "th", "", name);
  for (const each of tier.hosts) {
    const row = add(table, "tr");
    for (const text of [each.host, each.rank, bytes(each.held_bytes), each.refused]) add(row, "td", "", String(text));
  }
}

function checkpoints() {
  if (!data.io) return;
  const box = section("Checkpoint input and output", "Rows are ranks, columns are the steps of checkpoints. A rank that stands out keeps a save or load waiting: the others wait for it in the commit.");
  const meanings = {
    save_stage: "save: describe and stage", save_write: "save: write", save_commit: "save: commit, with the wait for other ranks",
    load_read: "load: read", load_gather: "load: gather from ranks of the host", load_set: "load: everything else",
  };
  const titles = {};
  for (const name of Object.keys(data.io.measures)) titles[name] = meanings[name.slice(5)] + (name.startsWith("size:") ? ", bytes" : ", time");
  heatMap(box, data.io, titles, (name) => name.startsWith("size:") ? bytes : time);
  add(box, "h3", "", "Time for one checkpoint");
  plainTable(box, [["phase", ""], ["ranks", "number"], ["median rank", "number"], ["slowest rank", ""], ["its time", "number"], ["its bytes", "number"], ["its rate", "number"], ["bytes of all", "number"], ["", ""]],
    data.io.phases.map((each) => [meanings[each.phase], each.ranks.toLocaleString("en"), time(each.median_ns), place(each.slowest), time(each.slowest_ns), each.bytes ? bytes(each.slowest_bytes) : "",
      each.bytes && each.slowest_ns ? bytes(each.slowest_bytes / each.slowest_ns * 1e9) + "/s" : "", each.bytes ? bytes(each.bytes) : "", each.background ? "behind training" : ""]));
}

function heatMap(box, map, titles, formats) { // formats: name of a measure -> function that shows a value
  const names = Object.keys(map.measures);
  const tools = add(box, "div", "tools"), select = choice(tools, "Show", names.map((name) => [name, titles[name]])), key = scaleKey(tools);
  const target = canvas(box, "heat map of ranks and steps"), most = add(box, "p", "note"), left = 64, top = 20;
  const values = {};
  for (const name of names) values[name] = new Uint16Array(decoded(map.measures[name].data).buffer);
  const rows = map.ranks.length, columns = map.steps.length;
  let wide = 1, high = 1;
  const rankName = (row) => map.ranks_per_row === 1 ? place(map.ranks[row]) : "ranks " + map.ranks[row] + " to " + (row + 1 < rows ? map.ranks[row + 1] - 1 : map.last_rank);
  painters.push(() => {
    const space = box.clientWidth - 34 - left, known = map.measures[select.value], unit = known.unit, limit = known.top || 1;
    wide = Math.min(space / columns, 64);
    high = Math.max(1, Math.min(24, Math.floor(640 / rows)));
    const pen = context(target, left + wide * columns + 2, top + high * rows + 2), own = values[select.value];
    for (let row = 0; row < rows; row += every(high, 14)) pen.fillText("rank " + map.ranks[row], 4, top + (row + 0.5) * high + 4);
    for (let column = 0; column < columns; column += every(wide, 44)) pen.fillText(column ? map.steps[column] : "step " + map.steps[0], left + column * wide + 2, 13);
    for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
      const value = own[row * columns + column];
      pen.fillStyle = value === 65535 ? noneColour : rgb(ramp((value * unit) / limit));
      const gap = wide > 6 && high > 6 ? 1 : 0;
      pen.fillRect(left + column * wide, top + row * high, wide - gap + (gap ? 0 : 0.5), high - gap);
    }
    const shows = formats(select.value);
    key(known.top, known.most > known.top * 1.01, shows);
    const middles = map.ranks.map((_, row) => {
      const line = Array.from(own.subarray(row * columns, (row + 1) * columns)).filter((value) => value !== 65535).sort((a, b) => a - b);
      return [row, line.length ? (line[Math.floor((line.length - 1) / 2)] + line[Math.floor(line.length / 2)]) / 2 * unit : 0];
    }).sort((a, b) => b[1] - a[1]);
    most.textContent = "Largest medians over the steps: " + middles.slice(0, 4).map(([row, value]) => rankName(row).replace(/ \(.*/, "") + " " + shows(value)).join(", ") +
      "; median of all rows: " + shows(middles[Math.floor(rows / 2)][1]) + ".";
  });
  hover(target, (x, y) => {
    const column = Math.floor((x - left) / wide), row = Math.floor((y - top) / high);
    if (column < 0 || row < 0 || column >= columns || row >= rows) return "";
    const value = values[select.value][row * columns + column];
    const steps = map.steps_per_column > 1 && column + 1 < columns ? "steps " + map.steps[column] + " to " + (map.steps[column + 1] - 1) : "step " + map.steps[column];
    return rankName(row) + "\n" + steps + ": " + (value === 65535 ? "not known" : formats(select.value)(value * map.measures[select.value].unit));
  });
  const cut = [];
  if (map.ranks_per_row > 1) cut.push(map.ranks_per_row + " ranks");
  if (map.steps_per_column > 1) cut.push(map.steps_per_column + " steps");
  if (cut.length) add(box, "p", "note", "So that it fits, a cell stands for up to " + cut.join(" and ") + " and shows the largest of their values.");
}

function lines() {
  const line = data.timeline, kinds = decoded(line.data), rows = line.ranks.length;
  const box = section("The last steps", "What each rank did, from left to right; each point has the colour of what took most of its time. Communication is time in which the rank waited for a call to end.");
  if (!rows) { add(box, "p", "note", "There are no records."); return; }
  const tools = add(box, "div", "tools"), seen = new Set(kinds);
  line.kinds.forEach((name, at) => {
    if (!seen.has(at)) return;
    const key = add(tools, "span", "key");
    add(key, "i").style.background = KINDS[at] || "var(--none)";
    add(key, "span", "", name);
  });
  const target = canvas(box, "timeline of the last steps"), left = 64, top = 20;
  let wide = 1, high = 1;
  painters.push(() => {
    wide = box.clientWidth - 36 - left;
    high = Math.max(5, Math.min(24, Math.floor(640 / rows)));
    const pen = context(target, left + wide + 2, top + high * rows + 26), bottom = top + high * rows;
    for (let row = 0; row < rows; row += every(high, 14)) pen.fillText("rank " + line.ranks[row], 4, top + (row + 0.5) * high + 4);
    for (let row = 0; row < rows; row++) for (let at = 0, end; at < line.parts; at = end) {
      const kind = kinds[row * line.parts + at];
      for (end = at + 1; end < line.parts && kinds[row * line.parts + end] === kind;) end++;
      pen.fillStyle = KINDS[kind] || noneColour;
      pen.fillRect(left + (at / line.parts) * wide, top + row * high, ((end - at) / line.parts) * wide + 0.4, high - (high > 7 ? 2 : 0));
    }
    let free = 0;
    for (const [number, at] of line.steps) {
      const x = left + (at / line.length) * wide, text = "step " + number;
      if (x < left) continue;
      pen.fillStyle = style("--text");
      pen.fillRect(x, top - 5, 1, bottom - top + 5);
      pen.fillStyle = style("--soft");
      if (x >= free) { pen.fillText(text, x + 3, 13); free = x + pen.measureText(text).width + 14; }
    }
    pen.fillStyle = style("--soft");
    pen.fillText("0", left, bottom + 16);
    const text = time(line.length);
    pen.fillText(text, left + wide - pen.measureText(text).width, bottom + 16);
  });
  hover(target, (x, y) => {
    const row = Math.floor((y - top) / high), at = Math.floor(((x - left) / wide) * line.parts);
    if (row < 0 || row >= rows || at < 0 || at >= line.parts) return "";
    return place(line.ranks[row]) + "\n" + line.kinds[kinds[row * line.parts + at]] + ", " + time((at / line.parts) * line.length) + " after the left edge";
  });
  const notes = ["The left edge is " + clock(line.begin_ms) + "; unickpt trace shows every call."];
  if (rows < line.of) notes.push("Shown are " + rows + " of " + line.of.toLocaleString("en") + " ranks: those with a verdict, those that came latest, and others at equal distances.");
  if (line.goes_on_s >= 0.1) notes.push("What goes on at the right edge went on for another " + time(line.goes_on_s * 1e9) + " until the rings were read.");
  for (const note of notes) add(box, "p", "note", note);
}

function delays() {
  const sizes = Object.keys(data.delays.cells).map(Number).sort((a, b) => a - b);
  const box = section("Delay matrix", "Point-to-point calls: the median time from when both ranks had entered until the receiver had it. A row that stands out is a rank that sends slowly, a column one that receives slowly, a single cell a link.");
  if (!sizes.length) { add(box, "p", "note", "The records hold no point-to-point call whose both sides are known."); return; }
  const name = (size) => size < 0 ? "all sizes" : size === 0 ? "no bytes" : bytes(2 ** (size - 1)) + " to " + bytes(2 ** size);
  const tools = add(box, "div", "tools"), select = choice(tools, "Size", sizes.map((size) => [size, name(size)])), key = scaleKey(tools);
  const target = canvas(add(box, "div", "scroll"), "delay matrix"), left = 78, top = 44, note = add(box, "p", "note");
  let side = 1, ranks = [], found = new Map();
  painters.push(() => {
    const cells = data.delays.cells[select.value], most = Math.max(...cells.map((cell) => cell[2]), 1);
    ranks = [...new Set(cells.flatMap((cell) => [cell[0], cell[1]]))].sort((a, b) => a - b);
    found = new Map(cells.map((cell) => [cell[0] + ">" + cell[1], cell]));
    const at = new Map(ranks.map((rank, index) => [rank, index]));
    side = Math.max(1, Math.min(54, Math.floor(Math.min(box.clientWidth - 66 - left, 720) / ranks.length)));
    const pen = context(target, Math.max(left + side * ranks.length + 34, 240), top + side * ranks.length + 6), step = every(side, side < 30 ? 34 : 14);
    pen.fillText("to rank", left, 14);
    pen.fillText("from rank", 4, 34);
    for (let index = 0; index < ranks.length; index += step) {
      pen.fillText(ranks[index], left + (index + (side > 20 ? 0.4 : 0)) * side, 34);
      pen.fillText(ranks[index], 40, top + (index + 0.5) * side + 4);
    }
    pen.fillStyle = noneColour;
    pen.fillRect(left, top, side * ranks.length, side * ranks.length);
    for (const [source, destination, value] of cells) {
      const mix = ramp(value / most), x = left + at.get(destination) * side, y = top + at.get(source) * side;
      pen.fillStyle = rgb(mix);
      pen.fillRect(x, y, Math.max(side - (side > 6 ? 1 : 0), 3), Math.max(side - (side > 6 ? 1 : 0), 3));
      if (side < 46) continue;
      pen.fillStyle = 0.3 * mix[0] + 0.59 * mix[1] + 0.11 * mix[2] > 140 ? "#111" : "#fff";
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(time(value), x + 3, y + side / 2 + 4);
    }
    key(most, false);
    const left_out = data.delays.in_all[select.value] - cells.length;
    const slowest = cells.slice(0, 4).map((cell) => "rank " + cell[0] + " to " + cell[1] + " " + time(cell[2])).join(", ");
    note.textContent = "Slowest: " + slowest + "; median of all pairs: " + time(cells[Math.floor(cells.length / 2)][2]) + "." +
      (left_out > 0 ? " Only the " + cells.length + " slowest pairs are shown; " + left_out + " are not." : "");
  });
  hover(target, (x, y) => {
    const cell = found.get(ranks[Math.floor((y - top) / side)] + ">" + ranks[Math.floor((x - left) / side)]);
    return cell ? place(cell[0]) + "\nto " + place(cell[1]) + "\nmedian " + time(cell[2]) + " of " + count(cell[3], "transfer") : "";
  });
}

function groups() {
  const box = section("Communicators", "Process groups by the bytes that their members gave, as far as the rings reach back; a collective counts once for each member that called it.");
  const table = add(add(box, "div", "scroll"), "table"), head = add(table, "tr");
  for (const [name, kind] of [["group", ""], ["ranks", ""], ["backend", ""], ["calls", "number"], ["given", "number"], ["not ended", "number"], ["operations", ""]]) add(head, "th", kind, name);
  for (const row of data.groups.rows) {
    const line = add(table, "tr"), first = add(line, "td", "", row.label);
    if (row.name && row.name !== row.label) add(first, "div", "soft", "process group " + row.name.slice(0, 60));
    add(line, "td", "", row.groups === 1 ? row.members + ": " + row.ranks : row.groups.toLocaleString("en") + " groups of " + count(row.members, "rank"));
    add(line, "td", "", row.backend);
    add(line, "td", "number", row.calls.toLocaleString("en"));
    add(line, "td", "number", bytes(row.bytes));
    add(line, "td", "number", row.going.toLocaleString("en"));
    add(line, "td", "", row.ops);
  }
  const more = data.groups.kinds - data.groups.rows.length;
  if (more > 0) add(box, "p", "note", count(more, "more row") + " not shown: those whose members gave least.");
}

function prices() {
  const found = data.prices;
  if (!found) return;
  const box = section("What a step costs", "A replay of steps " + found.steps[0] + " to " + found.steps[1] + ": the time of a step that each part costs (unickpt whatif). Prices overlap, so they do not add up.");
  const ns = (value) => time(value * 1e9), share = (value) => (100 * value / found.step_s).toFixed(1) + "%";
  add(box, "p", "", "A step takes " + ns(found.step_s) + ", and " + ns(found.ideal_s) + " with ranks like their peers, transfers like their class and no pauses: slowdown " + found.slowdown.toFixed(3) + ". Every figure is ± " + ns(found.error_s) + ".");
  plainTable(box, [["kind", ""], ["name", ""], ["time", "number"], ["of a step", "number"]], found.rows.map(([kind, name, value]) => [kind, name, ns(value), share(value)]));
  if (found.left) add(box, "p", "note", count(found.left, "more row") + " not shown: those that cost least.");
}

function seconds(value) {
  if (value < 100) return value.toFixed(1) + " s";
  if (value < 7200) return (value / 60).toFixed(1) + " min";
  return (value / 3600).toFixed(1) + " h";
}
function plainTable(parent, heads, rows) { // [text, class]; cells are texts
  const table = add(add(parent, "div", "scroll"), "table"), head = add(table, "tr");
  for (const [name, kind] of heads) add(head, "th", kind, name);
  for (const row of rows) {
    const line = add(table, "tr");
    row.forEach((text, at) => add(line, "td", heads[at][1], text));
  }
}
function rounds() {
  const job = data.rounds;
  if (!job) return;
  const box = section("Rounds", "Each start of the workers under torchrun --rdzv-backend unickpt. The height is the number of ranks. Effective training time is training seconds divided by wall seconds.");
  const share = (100 * job.effective).toFixed(2) + "%", sum = add(box, "p", "", "");
  sum.id = "effective";
  add(sum, "b", "", "Effective training time " + share + ": ");
  add(sum, "span", "", seconds(job.training_s) + " of " + seconds(job.wall_s) + ", in " + count(job.in_all, "round") + ". ");
  add(sum, "span", "", job.finished ? "The program finished." : job.closed ? "The job ended: " + job.closed : "The job was running at the end of this history.");
  const tools = add(box, "div", "tools"), colours = { training: "#2a9d6f", repeating: "#7fb2dd", starting: "#f0a020", regrouping: "#8a8f98", stalled: "#c8321f" };
  const meanings = { training: "training", repeating: "repeating steps since the last checkpoint", starting: "starting: imports, load, first step", regrouping: "stopping workers and regrouping hosts", stalled: "no step: fault, detection, deadline" };
  for (const part of job.parts) {
    const key = add(tools, "span", "key");
    add(key, "i").style.background = colours[part];
    add(key, "span", "", meanings[part]);
  }
  const target = canvas(box, "rounds of the job"), left = 64, high = 120, top = 6, most = Math.max(1, ...job.rounds.map((each) => each.world || each.count));
  const spans = []; // [begin, end, part, round]
  let end = 0;
  job.rounds.forEach((each, at) => {
    if (each.running_s > end) spans.push([end, each.running_s, "regrouping", at]);
    const passed = Math.max(Math.min(each.passed_s, Math.max(each.last_s, each.first_s)), each.first_s), last = Math.max(each.last_s, passed);
    spans.push([each.running_s, each.first_s, "starting", at], [each.first_s, passed, "repeating", at], [passed, last, "training", at], [last, each.ended_s, "stalled", at]);
    end = each.ended_s;
  });
  if (end < job.wall_s && !job.finished) spans.push([end, job.wall_s, "regrouping", job.rounds.length - 1]);
  let wide = 1;
  painters.push(() => {
    wide = box.clientWidth - 36 - left;
    const pen = context(target, left + wide + 2, top + high + 20);
    pen.fillText(count(most, "rank"), 4, top + 10);
    for (const [from, to, part, at] of spans) {
      if (to <= from) continue;
      const each = job.rounds[at], tall = part === "regrouping" ? 8 : Math.max(10, high * (each.world || each.count) / most);
      pen.fillStyle = colours[part];
      pen.fillRect(left + (from / job.wall_s) * wide, top + high - tall, Math.max(((to - from) / job.wall_s) * wide, 0.6), tall);
    }
    pen.fillStyle = style("--soft");
    pen.fillText("0", left, top + high + 16);
    const text = seconds(job.wall_s);
    pen.fillText(text, left + wide - pen.measureText(text).width, top + high + 16);
  });
  hover(target, (x) => {
    const now = ((x - left) / wide) * job.wall_s, found = spans.filter(([from, to]) => from <= now && now < to).pop();
    if (!found) return "";
    const each = job.rounds[found[3]];
    return "round " + each.round + ", " + (each.world ? count(each.world, "rank") : count(each.count, "host")) + "\n" + meanings[found[2]] + ", " + seconds(found[1] - found[0]);
  });
  if (!job.steps_known) add(box, "p", "note", "The job is not timed, so its steps are unknown: starting, repeated steps and the time before a fault is noticed count as training. Enable timing for exact figures.");
  add(box, "h3", "", "Downtime by cause");
  const wall = Math.max(job.wall_s, 1e-9);
  plainTable(box, [["cause", ""], ["times", "number"], ["downtime", "number"], ["of the wall time", "number"]],
    job.causes.map(([cause, times, all]) => [cause || "still running", times.toLocaleString("en"), seconds(all), (100 * all / wall).toFixed(2) + "%"]));
  add(box, "h3", "", "Each round");
  const shown = job.rounds.slice(-200);
  plainTable(box, [["round", ""], ["hosts", ""], ["ranks", "number"], ["began", "number"], ["lasted", "number"], ["training", "number"], ["last step", "number"], ["ended by", ""]],
    shown.map((each) => [each.round, each.count + ": " + each.hosts.slice(0, 8).join(", ") + (each.count > 8 ? ", ..." : ""), each.world ? String(each.world) : "?", seconds(each.running_s), seconds(each.ended_s - each.running_s),
      seconds(Math.max(each.last_s - each.passed_s, 0)), each.step ? each.step.toLocaleString("en") : "", each.cause + (each.text && each.text !== each.cause ? ": " + each.text : "")]));
  if (shown.length < job.in_all) add(box, "p", "note", "Only the newest " + shown.length + " rounds are shown.");
  if (job.orders.length) {
    add(box, "h3", "", "Orders");
    plainTable(box, [["at", "number"], ["order", ""]], job.orders.slice(-100).map(([at, , text]) => [seconds(at), text]));
  }
}

let noneColour = style("--none");
for (const part of data.world ? [heading, verdicts, rounds, prices, waiting, heat, lines, memory, checkpoints, delays, groups] : [heading, rounds]) part();
function again() { noneColour = style("--none"); paint(); }
again();
addEventListener("resize", again);
dark.addEventListener("change", again);
document.documentElement.dataset.drawn = "yes";
