// Reads the completions that the page contains as JSON, and shows a few at a time. No text ever becomes markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FIRST = 4, MORE = 20;  // entries shown at first and added by a click; five times as many lines of a list
  const SHORT = 1500;  // characters of thinking up to which it is open at first

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined && child !== "") element.append(child);
    return element;
  }

  const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + value.toFixed(2));
  const oneLine = (text) => { const flat = text.replace(/\s+/g, " ").trim(); return flat.length > 110 ? flat.slice(0, 110) + "…" : flat; };
  const hidden = (text) => make("span", { class: "hidden" }, text);
  const badge = (text, kind) => make("span", { class: "badge " + (kind || "") }, text);

  // Thinking is folded; text that the budget forced into it is marked.
  function thinking(segments, open) {
    if (!segments.length) return null;
    const parts = segments.map(([text, forced]) => (forced ? make("mark", { title: "forced by the thinking budget" }, text) : text || "(empty)"));
    return make("details", { class: "thought", open: open }, make("summary", {}, "thinking"), make("pre", {}, parts));
  }

  // The turns before the last one, with the tools' calls and results.
  const drawSteps = (steps) => (steps || []).map(([kind, text]) => (kind === "thinking" ? thinking([[text, false]], text.length < SHORT)
    : make("pre", { class: `step ${kind}` }, kind === "text" ? null : make("span", { class: "kind" }, kind + " "), text)));

  const gold = (entry) => ("gold" in entry ? make("span", { class: "gold" }, "right answer ", make("b", {}, entry.gold)) : null);

  // A prompt, whose references to images become the pictures that the page has, else marks.
  const REFERENCE = /<\|image:([0-9a-f]{14})\|>/;
  const mark = (digest) => `image ${digest.slice(0, 6)}`;
  const marked = (text) => text.split(REFERENCE).map((part, place) => (place % 2 ? `[${mark(part)}]` : part)).join("");
  const promptOf = (text) => make("pre", { class: "prompt" }, text.split(REFERENCE).map((part, place) => (place % 2 === 0 ? part
    : Object.hasOwn(data.images, part) ? make("img", { src: data.images[part], alt: mark(part), title: mark(part) }) : `[${mark(part)}]`)));
  const answer = (text) => make("pre", { class: "answer" }, text || "(no answer)");

  // A list that grows by a page at a time, under its filters; tells screen readers how many there are.
  function list(place, draw) {
    const count = make("p", { class: "count", role: "status" });
    const items = make("div", { class: "items" });
    const more = make("button", { type: "button", class: "more" }, "Show more");
    let entries = [], shown = 0, noun = "", begin = FIRST;
    function grow() {
      const start = shown, end = Math.min(shown + (shown ? MORE : begin), entries.length);
      const first = entries.slice(shown, end).map(draw);
      items.append(...first);
      shown = end;
      count.textContent = entries.length ? `${shown.toLocaleString("en")} of ${entries.length.toLocaleString("en")} ${noun}` : `no ${noun}`;
      more.hidden = shown >= entries.length;
      return start ? first[0] : null;
    }
    more.addEventListener("click", () => {
      const next = grow();
      if (next) { next.setAttribute("tabindex", "-1"); next.focus({ preventScroll: true }); }
    });
    place.append(count, items, more);
    return (found, what, head) => {
      [entries, noun, shown, begin] = [found, what, 0, head ? 5 * FIRST : FIRST];
      items.replaceChildren(...(head && found.length ? [head] : []));
      grow();
    };
  }

  function chooser(label, options, onChange) {
    const select = make("select", {}, options.map(([value, text]) => make("option", { value }, text)));
    select.addEventListener("change", onChange);
    return { element: make("label", { class: "control" }, make("span", {}, label), select), value: () => select.value };
  }

  function searcher(label, onChange) {
    const input = make("input", { type: "search", autocomplete: "off" });
    input.addEventListener("input", onChange);
    return { element: make("label", { class: "control" }, make("span", {}, label), input), value: () => input.value.trim().toLowerCase() };
  }

  // ---------------------------------------------------------------- prompt by prompt

  function side(name, sample) {
    if (!sample) return null;
    const verdict = sample.correct === true ? badge("right", "good") : sample.correct === false ? badge("wrong", "bad") : null;
    const thought = "thinking" in sample ? thinking([[sample.thinking || "(empty)", false]]) : null;
    const last = sample.steps ? [thought, answer(sample.answer)] : [answer(sample.answer), thought];
    return make("div", { class: "side" }, make("p", { class: "head" }, make("b", {}, name), verdict, make("span", { class: "notes" }, sample.notes)),
      drawSteps(sample.steps), last);
  }

  const KIND_COLOR = { broken: "bad", "reward fell": "bad", wrong: "bad", fixed: "good", "reward rose": "good", right: "good" };

  function drawPrompt(entry) {
    return make("article", {}, make("p", { class: "head" }, entry.kind ? badge(entry.kind, KIND_COLOR[entry.kind]) : null, gold(entry)),
      promptOf(entry.prompt), make("div", { class: "pair" }, side("before", entry.before), side("after", entry.after)));
  }

  const promptPlace = document.getElementById("prompt-browser");
  if (promptPlace) {
    const counts = new Map();
    for (const entry of data.prompts) if (entry.kind) counts.set(entry.kind, (counts.get(entry.kind) || 0) + 1);
    const options = [["", `all (${data.prompts.length})`], ...[...counts].map(([kind, count]) => [kind, `${kind} (${count})`])];
    const update = () => {
      const kind = kinds.value(), text = search.value();
      show(data.prompts.filter((entry) => (!kind || entry.kind === kind) && (!text || marked(entry.prompt).toLowerCase().includes(text))), "prompts");
    };
    const kinds = chooser("Show", options, update), search = searcher("Prompt contains", update);
    promptPlace.append(make("div", { class: "controls" }, kinds.element, search.element));
    const show = list(promptPlace, drawPrompt);
    update();
  }

  // ---------------------------------------------------------------- rollouts

  const { rows, prompts, rewards } = data.rollouts;
  const has = (row, mark) => row.marks.includes(mark);

  function drawRollout(row, withPrompt) {
    const marks = [has(row, "wrong") && badge("wrong", "bad"),
      has(row, "truncated") && badge("truncated", "warn"), has(row, "forced") && badge("forced", "warn"),
      has(row, "failed") && badge("tool failed", "warn")].filter(Boolean);
    const summary = make("summary", {},
      make("span", { class: "num" }, hidden("reward "), row.reward === null ? "not scored" : number(row.reward, 2)),
      make("span", { class: "num " + (row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "") }, hidden("advantage "), signed(row.advantage)),
      make("span", { class: "num" }, String(row.tokens), make("span", { class: "unit" }, " tokens")),
      make("span", { class: "excerpt" }, (withPrompt ? `${oneLine(marked(prompts[row.prompt]))} → ` : "") + (oneLine(row.answer || "") || "(no answer)")),
      make("span", { class: "marks" }, marks));
    const facts = [`step ${row.step}, group ${row.group}`, `advantage ${signed(row.advantage)}`,
      ...rewards.map((name, place) => `${name} ${row.rewards[place] === null ? "–" : number(row.rewards[place], 3)}`)];
    if (row.thinking_tokens !== undefined) facts.push(`${row.thinking_tokens} of ${row.tokens} tokens are thinking`);
    if (row.calls !== undefined) facts.push(`tool calls: ${row.calls}`);
    const body = make("div", { class: "body" });
    const details = make("details", { class: "rollout" }, summary, body);
    details.addEventListener("toggle", () => {  // drawn when it is first opened
      if (!details.open || body.childElementCount) return;
      body.append(...[withPrompt ? promptOf(prompts[row.prompt]) : null, withPrompt ? gold(row) : null, ...drawSteps(row.steps),
        thinking(row.thinking, row.thinking.reduce((sum, [text]) => sum + text.length, 0) < SHORT), answer(row.answer), make("p", { class: "notes" }, facts.join(" · "))].filter(Boolean));
    });
    return details;
  }

  const legend = (last) => make("p", { class: "columns", "aria-hidden": "true" }, ["reward", "advantage", "tokens", last].map((name) => make("span", { class: "num" }, name)));

  function drawGroup(group) {
    const first = group[0], known = group.filter((row) => row.reward !== null);
    const mean = known.length ? known.reduce((sum, row) => sum + row.reward, 0) / known.length : null;
    return make("article", {},
      make("p", { class: "head" }, make("b", {}, `step ${first.step}, group ${first.group}`), make("span", { class: "notes" }, `mean reward ${number(mean, 2)}`), gold(first)),
      promptOf(prompts[first.prompt]),
      legend("answer"), group.map((row) => drawRollout(row, false)));
  }

  const place = document.getElementById("rollout-browser");
  if (place && rows.length) {
    const FILTERS = { wrong: "wrong answers", truncated: "truncated", forced: "closed by the budget", failed: "a tool failed" };
    const found = Object.entries(FILTERS).filter(([mark]) => rows.some((row) => has(row, mark)));
    const options = [["groups", "by step and group"], ...found.map(([mark, text]) => [mark, `${text} (${rows.filter((row) => has(row, mark)).length})`]),
      ["best", "highest advantage"], ["longest", "longest"]];
    const steps = [...new Set(rows.map((row) => row.step))];
    const update = () => {
      const kind = kinds.value(), text = search.value();
      let chosen = rows.filter((row) => (stepped.value() === "" || row.step === Number(stepped.value())) && (!text || marked(prompts[row.prompt]).toLowerCase().includes(text)));
      if (kind === "groups") {
        const groups = new Map();
        for (const row of chosen) {
          const name = `${row.step} ${row.group}`;
          if (!groups.has(name)) groups.set(name, []);
          groups.get(name).push(row);
        }
        show([...groups.values()], "groups");
        return;
      }
      if (kind === "best") chosen = chosen.filter((row) => row.advantage !== null).sort((a, b) => b.advantage - a.advantage);
      else if (kind === "longest") chosen = [...chosen].sort((a, b) => b.tokens - a.tokens);
      else chosen = chosen.filter((row) => has(row, kind));
      show(chosen, "rollouts", legend("prompt → answer"));
    };
    const kinds = chooser("Show", options, update);
    const stepped = chooser("Step", [["", "all"], ...steps.map((step) => [String(step), String(step)])], update);
    const search = searcher("Prompt contains", update);
    place.append(make("div", { class: "controls" }, kinds.element, stepped.element, search.element));
    const show = list(place, (entry) => (Array.isArray(entry) ? drawGroup(entry) : drawRollout(entry, true)));
    update();
  }

  // ---------------------------------------------------------------- commands

  if (navigator.clipboard) for (const pre of document.querySelectorAll(".command pre")) {
    const button = make("button", { type: "button", class: "copy" }, "Copy");
    button.addEventListener("click", () => navigator.clipboard.writeText(pre.textContent.trim()).then(() => { button.textContent = "Copied"; }, () => {}));
    pre.before(button);
  }
})();
