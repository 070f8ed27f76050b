"use strict";
// Charts from plain data. A chart has panels, a panel has marks: curves over x, or one value per named row.
// Nothing is loaded; everything is drawn as SVG and drawn anew when the width changes.

const tip = document.getElementById("tip");
const colour = c => (c === "ink" ? "var(--ink)" : c);

function svg(parent, name, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function html(parent, name, attributes = {}, text) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push([i * step, (i * step).toFixed(digits)]);
  return found;
}

const scale = (low, high, from, to) => v => from + ((v - low) / (high - low || 1)) * (to - from);
// Accuracies with four digits, all else with two.
const shower = values => { const digits = Math.max(...values.map(Math.abs)) < 0.9 ? 4 : 2; return v => v.toFixed(digits); };
const range = (show, low, high) => (low === undefined ? "" : ` [${show(low)}, ${show(high)}]`);

function say(event, title, entries) {
  tip.replaceChildren();
  html(tip, "b", {}, title);
  for (const [label, c, text] of entries) {
    const line = html(tip, "div");
    const name = html(line, "span");
    html(name, "i", { style: `--c:${colour(c)}` });
    name.append(label);
    html(line, "span", {}, text);
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 16 + box.width > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - 16 - box.width : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - box.height - 4))}px`;
}
const hush = () => { tip.hidden = true; };

function frame(holder, width, height, label) {
  holder.replaceChildren();
  return svg(holder, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

function drawLines(holder, panel, marks) {
  const width = holder.clientWidth, height = Math.round(Math.min(300, Math.max(210, width * 0.62)));
  const left = 46, right = width - 8, top = 10, bottom = height - 38;
  const root = frame(holder, width, height, `${panel.title}: ${panel.ylabel} by ${panel.xlabel}`);
  const xs = marks.flatMap(m => [m.x[0], m.x[m.x.length - 1]]);
  const ys = marks.flatMap(m => m.y.concat(m.low, m.high));
  if (!marks.length) { svg(root, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing selected"); return; }
  const pad = (Math.max(...ys) - Math.min(...ys)) * 0.04 || 0.01, show = shower(ys);
  const x = scale(Math.min(...xs), Math.max(...xs), left, right);
  const low = Math.min(...ys) - pad, high = Math.max(...ys) + pad, y = scale(low, high, bottom, top);
  for (const [v, text] of ticks(low, high, 5)) {
    svg(root, "line", { class: "grid", x1: left, x2: right, y1: y(v), y2: y(v) });
    svg(root, "text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, text);
  }
  for (const [v, text] of ticks(Math.min(...xs), Math.max(...xs), width / 60))
    svg(root, "text", { x: x(v), y: bottom + 16, "text-anchor": "middle" }, text);
  svg(root, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
  svg(root, "text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, panel.xlabel);
  svg(root, "text", { transform: `translate(10 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, panel.ylabel);
  const path = (px, py) => px.map((v, i) => `${i ? "L" : "M"}${x(v).toFixed(1)} ${y(py[i]).toFixed(1)}`).join("");
  for (const m of marks) {
    const g = svg(root, "g", { class: "mark", style: `--c:${colour(m.colour)}`, "data-label": m.label });
    if (m.low.length) {
      const back = path([...m.x].reverse(), [...m.high].reverse()).replace("M", "L");
      svg(g, "path", { class: "band", d: path(m.x, m.low) + back + "Z" });
    }
    svg(g, "path", { class: `stroke ${m.dashed ? "dashed" : ""} ${m.main ? "main" : ""}`, d: path(m.x, m.y) });
  }
  const cross = svg(root, "line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  const hit = svg(root, "rect", { class: "hit", x: left, y: top, width: right - left, height: bottom - top });
  hit.addEventListener("pointermove", event => {
    const at = event.clientX - root.getBoundingClientRect().left;
    const value = scale(left, right, Math.min(...xs), Math.max(...xs))(at);
    cross.setAttribute("x1", at); cross.setAttribute("x2", at); cross.setAttribute("visibility", "visible");
    const found = marks.filter(m => value >= m.x[0] - 1e-9 && value <= m.x[m.x.length - 1] + 1e-9).map(m => {
      let i = m.x.findIndex(v => v >= value);
      if (i > 0 && value - m.x[i - 1] < m.x[i] - value) i -= 1;
      return [m.label, m.colour, show(m.y[i]) + range(show, m.low[i], m.high[i]), m.y[i]];
    });
    say(event, `${panel.xlabel} ${value.toFixed(1)}`, found.sort((a, b) => b[3] - a[3]));
  });
  hit.addEventListener("pointerleave", () => { hush(); cross.setAttribute("visibility", "hidden"); });
}

function drawRows(holder, panel, marks, kind, all) {
  const width = holder.clientWidth;
  const side = all.length > 1 && all.some(m => all.some(o => o !== m && o.x.some(r => m.x.includes(r))));
  const tall = side ? 34 : 23, top = 14, bottom = top + tall * panel.rows.length, height = bottom + 40;
  const left = Math.min(width * 0.45, 12 + 6.4 * Math.max(...panel.rows.map(r => r.length))), right = width - 44;
  const root = frame(holder, width, height, `${panel.title} ${panel.xlabel}`);
  const values = all.flatMap(m => m.y.concat(m.low, m.high)).concat(panel.references.map(r => r[0]), kind === "bars" ? [0] : []);
  const pad = (Math.max(...values) - Math.min(...values)) * 0.05 || 0.01, show = shower(values);
  const low = kind === "bars" ? 0 : Math.min(...values) - pad, high = Math.max(...values) + pad, x = scale(low, high, left, right);
  for (const [v, text] of ticks(low, high, Math.max(5, (right - left) / 65))) {
    svg(root, "line", { class: "grid", x1: x(v), x2: x(v), y1: top, y2: bottom });
    svg(root, "text", { x: x(v), y: bottom + 15, "text-anchor": "middle" }, text);
  }
  const half = 3 * panel.xlabel.length;  // about; a long label moves left rather than out of the page
  svg(root, "text", { x: Math.max(half, Math.min((left + right) / 2, width - half)), y: bottom + 33, "text-anchor": "middle" }, panel.xlabel);
  for (const [v, text] of panel.references) {
    svg(root, "line", { class: text ? "reference" : "zero", x1: x(v), x2: x(v), y1: top - 4, y2: bottom });
    if (text) svg(root, "text", { x: x(v), y: top - 5, "text-anchor": "middle" }, text);
  }
  panel.rows.forEach((row, i) => {
    svg(root, "text", { class: "name", x: left - 8, y: top + tall * (i + 0.5) + 4, "text-anchor": "end" }, row);
  });
  marks.forEach(m => {
    const g = svg(root, "g", { class: "mark", style: `--c:${colour(m.colour)}`, "data-label": m.label });
    const shift = side ? (all.indexOf(m) - (all.length - 1) / 2) * 13 : 0;
    m.x.forEach((row, i) => {
      const y = top + tall * (panel.rows.indexOf(row) + 0.5) + shift;
      if (kind === "bars") {
        svg(g, "rect", { class: "bar", x: left, y: y - 6, width: Math.max(0, x(m.y[i]) - left), height: 12, rx: 2 });
        svg(g, "text", { x: x(m.high[i] ?? m.y[i]) + 5, y: y + 4 }, show(m.y[i]));
      }
      if (m.low.length) svg(g, "line", { class: kind === "bars" ? "whisker" : "stroke", x1: x(m.low[i]), x2: x(m.high[i]), y1: y, y2: y });
      if (kind === "dots") svg(g, "circle", { class: `dot ${m.hollow ? "hollow" : ""}`, cx: x(m.y[i]), cy: y, r: 4 });
    });
  });
  panel.rows.forEach((row, i) => {
    const hit = svg(root, "rect", { class: "hit", x: 0, y: top + tall * i, width, height: tall });
    hit.addEventListener("pointermove", event => {
      const found = marks.filter(m => m.x.includes(row)).map(m => {
        const k = m.x.indexOf(row);
        return [m.label, m.colour, show(m.y[k]) + range(show, m.low[k], m.high[k])];
      });
      say(event, row, found);
    });
    hit.addEventListener("pointerleave", hush);
  });
}

function drawChart(figure, chart) {
  const hidden = new Set();
  const legend = html(figure, "div", { class: "legend" });
  const grid = html(figure, "div", { class: chart.panels.length === 4 ? "panels four" : "panels" });
  const holders = chart.panels.map(panel => {
    const box = html(grid, "div", { class: "panel" });
    if (panel.title) html(box, "h4", {}, panel.title);
    return [html(box, "div"), panel];
  });
  const draw = () => {
    for (const [holder, panel] of holders) {
      const marks = panel.marks.filter(m => !hidden.has(m.label));
      if (chart.kind === "lines") drawLines(holder, panel, marks);
      else drawRows(holder, panel, marks, chart.kind, panel.marks);
    }
  };
  const known = new Map(chart.panels.flatMap(p => p.marks).map(m => [m.label, m]));
  for (const [label, m] of known) {
    const button = html(legend, "button", { type: "button", "aria-pressed": "true", title: "show or hide" });
    const key = svg(button, "svg", { width: 22, height: 10, class: "mark", style: `--c:${colour(m.colour)}` });
    if (chart.kind === "lines") svg(key, "line", { class: `stroke ${m.dashed ? "dashed" : ""}`, x1: 0, x2: 22, y1: 5, y2: 5 });
    else svg(key, "circle", { class: `dot ${m.hollow ? "hollow" : ""}`, cx: 11, cy: 5, r: 4 });
    button.append(label);
    button.addEventListener("click", () => {
      if (!hidden.delete(label)) hidden.add(label);
      button.setAttribute("aria-pressed", String(!hidden.has(label)));
      draw();
    });
  }
  let width = 0;
  new ResizeObserver(() => { if (grid.clientWidth && grid.clientWidth !== width) { width = grid.clientWidth; draw(); } }).observe(grid);
}
