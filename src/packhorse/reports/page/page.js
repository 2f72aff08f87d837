// What the page does: draws the plots, sorts and filters the tables, switches light and dark.
// All that comes from files is put in as text (`textContent`), never as HTML.
"use strict";
(() => {
  const AT_FIRST = 100; // rows of a table
  const AXIS_WIDTH = 64; // pixels beside the plots that Vega draws
  const root = document.documentElement;
  const make = (tag, properties) => Object.assign(document.createElement(tag), properties);

  document.getElementById("no-script").remove();

  // Light and dark. The choice is kept where the browser allows it.
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const kept = (value) => {
    try {
      if (value === undefined) return localStorage.getItem("packhorse-theme");
      localStorage.setItem("packhorse-theme", value);
    } catch {
      // Pages in frames and files may not keep anything.
    }
    return null;
  };
  const showTheme = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  const before = kept();
  if (before === "light" || before === "dark") root.dataset.theme = before;
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    kept(root.dataset.theme);
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // Links within the page. In a frame without an address of its own they would lead elsewhere.
  const links = [...document.querySelectorAll('a[href^="#"]')];
  for (const link of links) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const target = document.getElementById(link.getAttribute("href").slice(1));
      target.scrollIntoView();
      target.focus({ preventScroll: true });
    });
  }
  const byKey = new Map(links.map((link) => [link.getAttribute("href").slice(1), link]));
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((each) => each.isIntersecting)) {
        for (const link of links) link.removeAttribute("aria-current");
        byKey.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-20% 0px -75% 0px" },
  );
  for (const section of document.querySelectorAll("section")) watcher.observe(section);

  // Tables.
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.key === undefined ? cell.textContent : Number(cell.dataset.key);
  };
  const order = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : order.compare(a, b);

  const sort = (table, rows, column, header) => {
    // Numbers begin with the largest, texts with the first.
    const was = header.getAttribute("aria-sort");
    const ascending = was ? was === "descending" : !header.classList.contains("n");
    const keyed = rows.map((row) => [valueOf(row, column), row]);
    keyed.sort(([a], [b]) => (ascending ? compare(a, b) : compare(b, a)));
    rows.splice(0, rows.length, ...keyed.map(([, row]) => row));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    table.tBodies[0].append(...rows);
  };

  const equip = (box) => {
    const table = box.querySelector("table");
    const rows = [...table.tBodies[0].rows];
    let all = false;
    let wanted = "";
    const texts = new Map();
    const matches = (row) => {
      if (!wanted) return true;
      if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
      return texts.get(row).includes(wanted);
    };
    const said = make("output", {});
    const more = make("button", { type: "button", textContent: "Show all" });
    const show = () => {
      let found = 0;
      for (const row of rows) {
        const fits = matches(row);
        row.hidden = !fits || (!all && found >= AT_FIRST);
        if (fits) found += 1;
      }
      const shown = all ? found : Math.min(found, AT_FIRST);
      said.textContent = `${shown.toLocaleString("en")} of ${found.toLocaleString("en")} rows`;
      more.hidden = all || found <= AT_FIRST;
    };
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const title = make("button", { type: "button", textContent: header.textContent });
      header.replaceChildren(title);
      title.addEventListener("click", () => {
        sort(table, rows, column, header);
        if (rows.length > AT_FIRST) show();
      });
    });
    if (rows.length < 20) return;
    const tools = make("div", { className: "tools" });
    const label = make("label", { textContent: "Filter" });
    const input = make("input", { type: "search", autocomplete: "off" });
    input.addEventListener("input", () => {
      wanted = input.value.trim().toLowerCase();
      show();
    });
    more.addEventListener("click", () => {
      all = true;
      show();
    });
    label.append(input);
    tools.append(label, said, more);
    box.prepend(tools);
    show();
  };
  for (const box of document.querySelectorAll("[data-table]")) equip(box);

  // Plots, one after the other, so that the page can be used meanwhile.
  const { config, specs } = JSON.parse(document.getElementById("data").textContent);
  const options = {
    ast: true,
    actions: false,
    defaultStyle: false,
    renderer: "svg",
    tooltip: { disableDefaultStyle: true },
  };
  const draw = async (place) => {
    const spec = specs[Number(place.dataset.plot)];
    const width = () => Math.max(place.clientWidth - AXIS_WIDTH, 100);
    const isVega = spec.width !== "container"; // Vega does not know the width of its place
    if (isVega) spec.width = width();
    const labelLimit = Math.min(0.4 * place.clientWidth, 220);
    const fitting = { ...config, axis: { ...config.axis, labelLimit } };
    const { view } = await window.vegaEmbed(place, spec, {
      ...options,
      config: fitting,
      mode: isVega ? "vega" : "vega-lite",
    });
    if (isVega) addEventListener("resize", () => view.width(width()).runAsync());
    place.dataset.drawn = "";
  };
  const drawAll = async () => {
    for (const place of document.querySelectorAll("[data-plot]")) {
      await draw(place);
      await new Promise((resolve) => setTimeout(resolve));
    }
    root.dataset.ready = "";
  };
  drawAll();
})();
