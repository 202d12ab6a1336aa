"use strict";
(() => {
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const root = document.documentElement, tip = document.getElementById("tip");

  // light and dark: as the system has it, until somebody chooses
  const theme = document.getElementById("theme"), themes = ["auto", "light", "dark"];
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % themes.length];
    if (next === "auto") delete root.dataset.theme; else root.dataset.theme = next;
    theme.textContent = `theme: ${next}`;
  });

  // tables: a click on a heading sorts, a second one the other way round; rows stay in their groups
  const key = (row, column) => {
    const cell = row.cells[column], text = cell ? cell.dataset.v || cell.textContent.trim() : "";
    return text === "" || Number.isNaN(Number(text)) ? null : Number(text);
  };
  const sort = (heading) => {
    const table = heading.closest("table"), column = heading.cellIndex;
    const up = heading.ariaSort === "descending" || (heading.ariaSort === null && column === 0);
    all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("head"));
      rows.sort((one, two) => {
        const a = key(one, column), b = key(two, column);
        if (a === null && b === null) {
          const words = (row) => (row.cells[column] || {}).textContent || "";
          return words(one).localeCompare(words(two), "en", { numeric: true }) * (up ? 1 : -1);
        }
        return a === null ? 1 : b === null ? -1 : (a - b) * (up ? 1 : -1);
      });
      body.append(...rows);
    }
  };
  all("thead th").forEach((heading) => heading.addEventListener("click", () => sort(heading)));

  // the numbers of a figure are those of its CSV, which the link holds
  const known = new WeakMap();
  const records = (figure) => {
    if (!known.has(figure)) {
      const link = figure.querySelector("a.file").getAttribute("href");
      known.set(figure, parse(decodeURIComponent(link.slice(link.indexOf(",") + 1))));
    }
    return known.get(figure);
  };
  const parse = (text) => {
    const rows = [[]];
    let cell = "", quoted = false;
    for (let at = 0; at < text.length; at++) {
      const one = text[at];
      if (quoted) {
        if (one !== '"') cell += one;
        else if (text[at + 1] === '"') { cell += '"'; at++; } else quoted = false;
      } else if (one === '"') quoted = true;
      else if (one === ",") { rows.at(-1).push(cell); cell = ""; }
      else if (one === "\n") { rows.at(-1).push(cell); cell = ""; rows.push([]); }
      else cell += one;
    }
    return rows;
  };
  const seen = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\uffa0\u{e0100}-\u{e01ef}]/gu,
    (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
  const short = (text) => /^-?\d*\.\d{6,}(e-?\d+)?$/.test(text) ? String(Number(Number(text).toPrecision(5))) : seen(text);
  const told = (figure, row) => {
    const [head, ...rows] = records(figure);
    return (rows[row] || []).map((cell, at) => cell === "" ? "" : `${seen(head[at])}: ${short(cell)}`).filter(Boolean).join("\n");
  };

  // what is under the pointer: the nearest point, or the cell of a map
  const points = new WeakMap();
  const places = (path) => {
    if (!points.has(path)) {
      points.set(path, [...path.getAttribute("d").matchAll(/M(\S+) (\S+?)h0/g)].map((one) => [+one[1], +one[2]]));
    }
    return points.get(path);
  };
  const nearest = (svg, x, y) => {
    let best = null, least = 22 ** 2;
    for (const path of all(".hit", svg)) {
      places(path).forEach(([px, py], at) => {
        const far = (px - x) ** 2 + (py - y) ** 2;
        if (far < least) { least = far; best = { x: px, y: py, row: +path.dataset.r + ("same" in path.dataset ? 0 : at) }; }
      });
    }
    return best;
  };
  const cell = (svg, x, y) => {
    for (const map of all("[data-map]", svg)) {
      const [left, top, width, height, across, upright, first, turned] = map.dataset.map.split(" ").map(Number);
      const column = Math.floor((x - left) / width), row = Math.floor((y - top) / height);
      if (column >= 0 && row >= 0 && column < across && row < upright) {
        const at = first + (turned ? column * upright + row : row * across + column);
        return { x: left + column * width, y: top + row * height, w: width, h: height, row: at };
      }
    }
    return null;
  };
  const mark = (svg, found) => {
    document.getElementById("spot")?.remove();
    if (!found) return;
    const shape = document.createElementNS(svg.namespaceURI, found.w ? "rect" : "circle");
    const told = found.w ? { x: found.x, y: found.y, width: found.w - 1, height: found.h - 1 } : { cx: found.x, cy: found.y, r: 5.5 };
    for (const [name, value] of Object.entries({ id: "spot", ...told })) shape.setAttribute(name, value);
    svg.append(shape);
  };
  const hide = () => { tip.hidden = true; document.getElementById("spot")?.remove(); };
  const look = (event) => {
    const svg = event.currentTarget, box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const found = cell(svg, x, y) || nearest(svg, x, y), text = found && told(svg.closest("figure"), found.row);
    if (!text) return hide();
    mark(svg, found);
    tip.textContent = text;
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, root.clientWidth - tip.offsetWidth - 8);
    const under = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(left, 4) + scrollX}px`;
    tip.style.top = `${(under ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12) + scrollY}px`;
  };
  for (const svg of all("figure > svg")) {
    svg.addEventListener("pointermove", look);
    svg.addEventListener("pointerdown", look);
    svg.addEventListener("pointerleave", hide);
  }

  // legends: what is pointed at stands out
  for (const item of all(".legend li")) {
    const svg = item.closest("figure").querySelector("svg");
    const mine = svg.querySelector(`.s${item.dataset.s}`);
    if (!mine) continue;
    item.addEventListener("pointerenter", () => { svg.classList.add("dim"); mine.classList.add("on"); });
    item.addEventListener("pointerleave", () => { svg.classList.remove("dim"); mine.classList.remove("on"); });
  }

  // commands: copied as they are
  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("pre").textContent;
      try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { button.textContent = "select it"; }
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
  addEventListener("beforeprint", () => all("details").forEach((one) => { one.open = true; }));
})();
