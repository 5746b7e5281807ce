// Draws DATA (page.py says what is in it) on a canvas; the wheel zooms, dragging pans, hovering names an action.
"use strict";
const LEFT = 112, RIGHT = 56, COMPUTE = 0.74, RUN_GAP = 2, TICK_STEPS = [1, 2, 5];
const canvas = document.getElementById("rows"), axis = document.getElementById("axis");
const tip = document.getElementById("tip");
const height = Math.max(14, Math.min(44, Math.floor(480 / DATA.rows.length)));
const rows = DATA.rows.map((row) => {
  let start = 0;
  const starts = row.gaps.map((gap) => (start += gap));
  return { ...row, starts };
});
const frame = window.frameElement;
let from = 0, to = DATA.shown, width = 0;

const x = (tick) => LEFT + ((tick - from) / (to - from)) * (width - LEFT - RIGHT);
const tickAt = (pixel) => from + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (to - from);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function unitOf(value_s) {
  return value_s >= 1 ? [1, "s"] : value_s >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
}

function seconds(tick, digits) {
  const value_s = (tick / DATA.ticks) * DATA.makespan_s, [scale, unit] = unitOf(value_s);
  return `${Number((value_s * scale).toPrecision(digits))} ${unit}`;
}

function prepared(element, tall) {
  const ratio = window.devicePixelRatio || 1;
  element.width = Math.round(width * ratio);
  element.height = Math.round(tall * ratio);
  element.style.height = `${tall}px`;
  const context = element.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, tall);
  context.textBaseline = "middle";
  return context;
}

function draw() {
  width = canvas.parentElement.clientWidth;
  const context = prepared(canvas, rows.length * height);
  const font = Math.max(8, Math.min(12, height * 0.48));
  const [ink, bubble] = [colour("--ink"), colour("--bubble")];
  context.font = `${font}px system-ui, sans-serif`;
  rows.forEach((row, place) => {
    const top = place * height;
    context.fillStyle = bubble;
    context.fillRect(LEFT, top, Math.min(x(DATA.ticks), width - RIGHT) - LEFT, height - 1);
    context.save();
    context.beginPath();
    context.rect(LEFT, top, width - LEFT - RIGHT, height);
    context.clip();
    drawRow(context, row, top, font);
    context.restore();
    context.fillStyle = ink;
    context.textAlign = "right";
    context.fillText(row.name, LEFT - 8, top + (height * COMPUTE) / 2, LEFT - 12);
    context.textAlign = "left";
    context.fillText(`${(100 * row.bubble).toFixed(1)}%`, width - RIGHT + 8, top + (height * COMPUTE) / 2);
  });
  drawAxis();
}

function drawRow(context, row, top, font) {
  const drawnTo = [-1, -1];
  let run = null;
  context.textAlign = "center";
  for (let i = 0; i < row.starts.length && row.starts[i] < to; i++) {
    const end = row.starts[i] + row.durations[i];
    if (end < from) continue;
    const [fill, band] = DATA.paints[row.paints[i]];
    const left = x(row.starts[i]), right = x(end);
    if (!band) run = inRun(context, run, row, i, left, right, top, font);
    if (right - left < 0.3 && right < drawnTo[band] + 0.3) continue;
    drawnTo[band] = right;
    const gap = right - left > 6 ? 0.7 : 0;
    const y = top + (band ? COMPUTE + 0.04 : 0) * height;
    context.fillStyle = fill;
    context.fillRect(left, y, Math.max(right - left - gap, 0.3), (band ? 0.2 : COMPUTE) * height);
  }
  drawNumbers(context, run, top, font);
}

// Boxes in a row that are painted alike and are of one microbatch; the numbers of the run before are drawn.
function inRun(context, run, row, i, left, right, top, font) {
  const number = row.microbatches[i], paint = row.paints[i];
  if (run === null || run.number !== number || run.paint !== paint || left - run.right > RUN_GAP) {
    drawNumbers(context, run, top, font);
    run = { number, paint, left, right, painted: 0, boxes: [] };
  }
  run.right = right;
  run.painted += right - left;
  if (hasRoom(number, left, right, font)) run.boxes.push([left, right]);
  return run;
}

// A number in each box of a run that has room, or one for all, unless it is mostly empty.
function drawNumbers(context, run, top, font) {
  if (run === null || !DATA.numbered || run.number < 0) return;
  const isPainted = run.painted > 0.5 * (run.right - run.left);
  const whole = isPainted && hasRoom(run.number, run.left, run.right, font) ? [[run.left, run.right]] : [];
  context.fillStyle = DATA.paints[run.paint][2];
  for (const [left, right] of run.boxes.length ? run.boxes : whole)
    context.fillText(run.number, (Math.max(left, LEFT) + Math.min(right, width - RIGHT)) / 2, top + (height * COMPUTE) / 2);
}

function hasRoom(number, left, right, font) {
  return right - left >= (String(number).length * 0.62 + 0.3) * font;
}

function drawAxis() {
  const context = prepared(axis, 26);
  const shown_s = ((to - from) / DATA.ticks) * DATA.makespan_s;
  if (!(shown_s > 0)) return;
  const power = 10 ** Math.floor(Math.log10(shown_s / 8));
  const step_s = power * (TICK_STEPS.find((each) => each * power * 10 >= shown_s) || 10);
  context.fillStyle = colour("--soft");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  const ticksPer_s = DATA.ticks / DATA.makespan_s, [scale, unit] = unitOf(to / ticksPer_s);
  const decimals = Math.max(0, -Math.floor(Math.log10(step_s * scale) + 1e-9));
  for (let n = Math.ceil(from / ticksPer_s / step_s - 1e-9); n * step_s * ticksPer_s <= to; n++) {
    const pixel = x(n * step_s * ticksPer_s);
    context.fillRect(pixel, 0, 1, 5);
    context.fillText(`${(n * step_s * scale).toFixed(decimals)} ${unit}`, pixel, 15);
  }
}

function look(first, last) {
  const span = Math.min(Math.max(last - first, DATA.ticks / 1e5), DATA.shown);
  from = Math.min(Math.max(first, 0), DATA.shown - span);
  to = from + span;
  requestAnimationFrame(draw);
}

function zoom(factor, pixel) {
  const fixed = tickAt(pixel);
  look(fixed - (fixed - from) * factor, fixed - (fixed - from) * factor + (to - from) * factor);
}

function hover(event) {
  const box = canvas.getBoundingClientRect();
  const inside = (event.clientY - box.top) / height, row = rows[Math.floor(inside)];
  const band = inside % 1 > COMPUTE ? 1 : 0, tick = tickAt(event.clientX - box.left);
  const slack = ((to - from) / width) * 1.5;
  let found = -1;
  for (let i = 0; row && i < row.starts.length && row.starts[i] <= tick + slack; i++)
    if (row.starts[i] + row.durations[i] >= tick - slack && DATA.paints[row.paints[i]][1] === band) found = i;
  tip.hidden = found < 0;
  if (found < 0) return;
  const times = `${seconds(row.durations[found], 4)}, from ${seconds(row.starts[found], 6)}`;
  const of = DATA.paints[row.paints[found]][3];
  const action = DATA.texts[row.actions[found]].replace("\u0001", row.microbatches[found]);
  tip.textContent = `${action}${of ? ` (${of})` : ""}\n${row.name}\n${times}`;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.min(event.pageX + 14, room)}px`;
  tip.style.top = `${event.pageY + 16}px`;
}

let held = null;
canvas.addEventListener("pointerdown", (event) => {
  held = { x: event.clientX, y: event.clientY, from, to, scroll: window.scrollY };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", () => (held = null));
canvas.addEventListener("pointermove", (event) => {
  if (!held) return hover(event);
  const moved = ((event.clientX - held.x) / (width - LEFT - RIGHT)) * (held.to - held.from);
  tip.hidden = true;
  look(held.from - moved, held.to - moved);
  window.scrollTo(window.scrollX, held.scroll - (event.clientY - held.y));
});
canvas.addEventListener("pointerleave", () => (tip.hidden = true));
canvas.addEventListener("dblclick", () => look(0, DATA.shown));
canvas.addEventListener("wheel", (event) => {
  // Among others on a page, the wheel by itself is for the page.
  if (event.shiftKey || (frame && !event.ctrlKey)) return;
  event.preventDefault();
  zoom(Math.exp(event.deltaY * 0.0015), event.clientX - canvas.getBoundingClientRect().left);
}, { passive: false });
document.addEventListener("keydown", (event) => {
  const part = (to - from) / 5, middle = LEFT + (width - LEFT - RIGHT) / 2;
  const keys = {
    "+": () => zoom(0.7, middle), "-": () => zoom(1 / 0.7, middle), 0: () => look(0, DATA.shown),
    ArrowLeft: () => look(from - part, to - part), ArrowRight: () => look(from + part, to + part),
  };
  if (keys[event.key] && !event.ctrlKey && !event.metaKey) keys[event.key]();
});
window.addEventListener("resize", draw);
draw();
if (frame) frame.style.height = `${document.documentElement.offsetHeight + 2}px`;
