"use strict";
(() => {
  const root = document.documentElement, charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const drawn = new Map();

  // Charts are drawn one after the other, those in view first, so that the page stays at hand meanwhile, and again when the theme changes.
  // One of very many marks is a canvas: a browser takes far longer to lay out as many elements.
  const many = (spec) => spec.data.some((data) => data.values && data.values.length > 800);
  // On a phone the names of rows leave room for what they name, and a legend is as wide as the screen.
  const fitted = (spec, width) => width >= 500 ? spec : {
    ...spec, axes: (spec.axes || []).map((axis) => ({ ...axis, labelLimit: Math.min(axis.labelLimit || 140, 140) })),
    legends: (spec.legends || []).map((legend) => ({ ...legend, columns: 1 })),
  };
  async function draw(element) {
    const name = element.dataset.chart, ink = dark() ? "#e6edf3" : "#1b1f24", line = dark() ? "#30363d" : "#d0d7de";
    const config = {
      background: "transparent", style: { "guide-label": { fill: ink }, "guide-title": { fill: ink }, cell: { stroke: "transparent" } }, view: { stroke: null },
      axis: { gridColor: line, domainColor: line, tickColor: line, labelColor: ink, titleColor: ink },
      legend: { labelColor: ink, titleColor: ink },
    };
    const old = drawn.get(element);
    if (old) old.finalize();
    element.textContent = "";
    drawn.set(element, await vegaEmbed(element, fitted(charts[name], element.clientWidth), {
      mode: "vega", actions: false, renderer: many(charts[name]) ? "canvas" : "svg", config, tooltip: { theme: dark() ? "dark" : "light" },
    }));
  }
  let turn = 0;
  async function again() {
    const mine = ++turn, all = [...document.querySelectorAll(".chart")];
    const seen = (element) => { const box = element.getBoundingClientRect(); return box.top < innerHeight && box.bottom > 0; };
    for (const element of [...all.filter(seen), ...all.filter((x) => !seen(x))]) {
      if (mine !== turn) return;
      await draw(element);
      await new Promise((rested) => setTimeout(rested, 0));
    }
    if (!root.dataset.drawn) root.dataset.drawn = Math.round(performance.now());  // ms since the page was asked for
  }
  again();
  document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; again(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!root.dataset.theme) again(); });

  // tables are sorted by their headings
  const value = (row, k) => { const cell = row.cells[k]; return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value); };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, k) => {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = head.textContent; head.textContent = ""; head.append(button);
      for (const row of table.tBodies[0].rows) if (row.cells[k]) row.cells[k].dataset.label = button.textContent;  // shown where rows are cards
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const x = value(a, k), y = value(b, k);
          return (up ? 1 : -1) * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
        });
        table.tBodies[0].append(...rows);
      });
    });
  }

  // the tree
  const folds = [...document.querySelectorAll(".tree details")];
  const press = (id, act) => document.getElementById(id)?.addEventListener("click", act);
  press("unfold", () => folds.forEach((d) => { d.open = true; }));
  press("fold", () => folds.forEach((d, k) => { d.open = k === 0; }));
  const reveal = (element) => { for (let d = element.closest("details"); d; d = d.parentElement.closest("details")) d.open = true; };
  const follow = () => { const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1))); if (target) { reveal(target); target.scrollIntoView({ block: "center" }); } };
  addEventListener("hashchange", follow);
  const lines = new Map([...document.querySelectorAll(".code a")].map((a) => [a.dataset.op, a]));
  for (const op of document.querySelectorAll(".op")) {
    const line = lines.get(op.id.slice(3));
    if (!line) continue;
    op.title = "Enter or double click: its line in the source";
    const go = () => { line.scrollIntoView({ block: "center" }); line.focus(); };
    op.addEventListener("dblclick", go);
    op.addEventListener("keydown", (e) => { if (e.key === "Enter") go(); });
  }

  // search
  const find = document.getElementById("find"), found = document.getElementById("found");
  const places = [...document.querySelectorAll("[data-search]"), ...lines.values()];
  let hits = [], at = -1;
  const show = (k) => { at = (k + hits.length) % hits.length; reveal(hits[at]); hits[at].scrollIntoView({ block: "center" }); found.textContent = `${at + 1} of ${hits.length}`; };
  find.addEventListener("input", () => {
    for (const hit of hits) hit.classList.remove("hit");
    const text = find.value.trim().toLowerCase();
    hits = text.length > 1 ? places.filter((p) => (p.dataset.search || p.textContent).toLowerCase().includes(text)) : [];
    for (const hit of hits) hit.classList.add("hit");
    at = -1;
    if (hits.length) show(0); else found.textContent = text.length > 1 ? "nothing found" : "";
  });
  find.addEventListener("keydown", (e) => {
    if (e.key === "Enter" && hits.length) show(at + (e.shiftKey ? -1 : 1));
    if (e.key === "Escape") { find.value = ""; find.dispatchEvent(new Event("input")); find.blur(); }
  });
  addEventListener("keydown", (e) => { if (e.key === "/" && !/^(INPUT|TEXTAREA)$/.test(e.target.tagName)) { e.preventDefault(); find.focus(); } });
  follow();
})();
