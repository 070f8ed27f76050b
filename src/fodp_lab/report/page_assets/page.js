// Starts the charts, the table of raw rows and the switch between light and dark.
const data = JSON.parse(document.getElementById("data").textContent);

for (const figure of document.querySelectorAll("figure[data-chart]")) drawChart(figure, data.charts[figure.dataset.chart]);

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

function rawRows(box, { columns, rows }) {
  const filter = html(box, "input", { type: "search", placeholder: "filter, e.g. cifar10 dp-sgd", "aria-label": "filter rows" });
  const count = html(box, "p", { class: "dim" });
  const table = html(html(box, "div", { class: "scroll" }), "table");
  const head = html(html(table, "thead"), "tr"), body = html(table, "tbody");
  let sorted = -1, down = false;
  const draw = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(row => { const text = row.join(" ").toLowerCase(); return words.every(w => text.includes(w)); });
    if (sorted >= 0) found.sort((a, b) => order(a[sorted], b[sorted]) * (down ? -1 : 1));
    count.textContent = `${found.length} of ${rows.length} runs`;
    body.replaceChildren(...found.map(row => {
      const line = document.createElement("tr");
      for (const cell of row) html(line, "td", {}, cell === null ? "–" : String(cell));
      return line;
    }));
    [...head.children].forEach((th, i) => th.setAttribute("aria-sort", i !== sorted ? "none" : down ? "descending" : "ascending"));
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a ?? "").localeCompare(String(b ?? "")));
  columns.forEach((name, i) => html(head, "th", { scope: "col", title: "sort" }, name).addEventListener("click", () => {
    down = sorted === i && !down;
    sorted = i;
    draw();
  }));
  filter.addEventListener("input", draw);
  draw();
}

const rows = document.getElementById("rows");
rows.addEventListener("toggle", () => rawRows(rows, data.rows), { once: true });
