"use strict";
// Reads /canopy/status every few seconds. Text from the server only ever becomes text nodes.
const EVERY_MS = 2500;
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLOURS = ["--device", "--host", "--disk", "--warn", "--dim", "--text"];

function node(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = String(text);
  if (className) made.className = className;
  return made;
}
function show(id, ...children) { byId(id).replaceChildren(...children); }
function only(id, there) { byId(id).closest("section").hidden = !there; return there; }
function table(heads, rows) {  // a head that begins with ~ is left out where the screen is narrow
  const made = node("table"), top = node("tr");
  const kinds = heads.map((head, i) => [i && "n", head[0] === "~" && "more"].filter(Boolean).join(" "));
  heads.forEach((head, i) => top.append(node("th", head.replace("~", ""), kinds[i])));
  made.append(top);
  for (const row of rows) {
    const line = node("tr", null, row.now ? "now" : "");
    (row.cells || row).forEach((cell, i) => {
      const field = node("td", null, kinds[i]);
      field.append(cell instanceof Node ? cell : document.createTextNode(cell ?? "-"));
      line.append(field);
    });
    made.append(line);
  }
  return rows.length ? made : node("p", "nothing yet", "note");
}
function size(n) {
  for (const unit of ["", "k", "M", "G", "T"]) {
    if (Math.abs(n) < 999.5) return unit ? n.toPrecision(3) + unit : n.toFixed(0);
    n /= 1000;
  }
  return n.toPrecision(3) + "P";
}
const bytes = (n) => size(n).replace(/[kMGTP]?$/, "\u00a0$&B");
function lasting(s) {
  if (s == null) return "-";
  for (const [unit, one] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]])
    if (s >= 2 * one || (one === 1 && s >= 1)) return +(s / one).toPrecision(3) + " " + unit;
  return s ? +(1000 * s).toPrecision(3) + " ms" : "0";
}
const percent = (part, whole) => (whole ? (100 * part / whole).toFixed(1) + " %" : "-");
function bar(share, kind) {
  const outer = node("span", null, "bar"), inner = node("i", null, kind);
  inner.style.width = 100 * Math.min(1, Math.max(0, share)) + "%";
  outer.append(inner);
  return outer;
}
const sum = (values) => values.reduce((a, b) => a + b, 0);
function added(ranks, pick) {
  const total = {};
  for (const rank of ranks)
    for (const [key, n] of Object.entries(pick(rank) || {})) total[key] = (total[key] || 0) + n;
  return total;
}

const plots = {};
function plot(id, xs, series, options = {}) {
  const place = byId(id);
  if (xs.length < 2) {
    plots[id] = null;
    place.replaceChildren(node("p", xs.length ? "a chart from the next minute on" : "nothing yet", "note"));
    return;
  }
  const key = series.map((s) => s.label).join("|") + css("--text");
  const data = [xs, ...series.map((s) => s.values)];
  if (plots[id] && plots[id].key === key) { plots[id].chart.setData(data); return; }
  place.replaceChildren();
  const clock = (_, all) => all.map((s) => new Date(1000 * s).toTimeString().slice(0, 5));
  const axis = { stroke: css("--dim"), grid: { stroke: css("--line") }, ticks: { stroke: css("--line") } };
  const wide = (_, labels) => Math.max(48, 20 + 8 * Math.max(0, ...(labels || []).map((one) => String(one ?? "").length)));
  const chart = new uPlot({
    width: Math.max(280, place.clientWidth || 420), height: 190,
    scales: { x: options.x || {}, y: options.y || {} },
    axes: [{ ...axis, ...(options.xAxis || { space: 60, incrs: [60, 300, 600, 1200], values: clock }) }, { ...axis, size: wide, values: options.yValues }],
    series: [options.xSeries || {}, ...series.map((s, i) => ({
      label: s.label, stroke: css(COLOURS[i % COLOURS.length]), width: 2, points: { show: false }, value: options.value,
    }))],
  }, data, place);
  plots[id] = { key, chart };
}
function reachable() {  // a section that scrolls must be reachable by keyboard
  for (const section of document.querySelectorAll("section"))
    if (section.scrollWidth > section.clientWidth) section.tabIndex = 0; else section.removeAttribute("tabindex");
}
addEventListener("resize", () => {
  reachable();
  for (const [id, one] of Object.entries(plots))
    if (one) one.chart.setSize({ width: Math.max(280, byId(id).clientWidth), height: 190 });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);

function whatIf(meter) {
  if (!only("whatif", meter)) return;
  if (meter.undecided) { byId("whatif-note").textContent = ""; show("whatif", node("p", meter.undecided, "note")); return; }
  const at = (policy, capacity) => meter.arms.find((a) => a.policy === policy && a.capacity === capacity);
  const error = (arm) => arm.running ? "" : " ±\u00a0" + (200 * arm.standard_error).toFixed(1);
  const share = (arm) => arm ? (100 * arm.hit_ratio).toFixed(1) + "\u00a0%" + error(arm) : null;
  const points = (arm) => {
    if (!arm || arm.running) return "";
    const more = 100 * (arm.hit_ratio - meter.hit_ratio);
    return (more < 0 ? "−" : "+") + Math.abs(more).toFixed(1) + error(arm);
  };
  const others = [...new Set(meter.arms.map((a) => a.capacity))].filter((name) => name !== "now");
  const rows = [...new Set(meter.arms.map((a) => a.policy))].map((policy) => {
    const now = at(policy, "now");
    return { now: policy === meter.running, cells: [policy, bar(now ? now.hit_ratio : 0), share(now), points(now), ...others.map((n) => share(at(policy, n)))] };
  });
  byId("whatif-note").textContent = "Estimated token hit ratio of each policy, ± two standard errors; from " +
    size(meter.sampled_requests) + " requests" + (meter.one_block_in > 1 ? ", one block in " + meter.one_block_in : "") + ".";
  show("whatif", table(["policy", "~", "now", "points", ...others], rows));
}

function tiers(ranks) {
  const rows = [], tokens = (all, key) => sum(all.map((t, i) => (t[key] || 0) / (ranks[i].kv_bytes_per_token || 1)));
  for (const name of Object.keys(ranks[0].tiers)) {
    const all = ranks.map((r) => r.tiers[name]), room = sum(all.map((t) => t.capacity_bytes || 0));
    const used = sum(all.map((t) => t.used_bytes || 0));
    const gone = sum(all.flatMap((t) => Object.values(t.evicted_tokens)));
    rows.push([name, ranks[0].policies[name], bar(used / (room || 1), name), size(tokens(all, "used_bytes")),
      room ? size(tokens(all, "capacity_bytes")) : "-", size(sum(all.map((t) => t.entered_tokens))), size(gone), room ? bytes(room) : "-"]);
  }
  show("tiers", table(["tier", "policy", "~", "used", "capacity", "~entered", "~evicted", "size"], rows));
}

function hits(ranks) {
  const prompts = sum(ranks.map((r) => r.prompt_tokens_last_minute));
  const tier = added(ranks, (r) => Object.fromEntries(Object.entries(r.tiers).map(([k, t]) => [k, t.hit_tokens_last_minute])));
  show("ratios", node("span", percent(sum(Object.values(tier)), prompts), "big"),
    node("span", "  in the last minute: " + Object.entries(tier).map(([k, n]) => k + " " + percent(n, prompts)).join(", ")));
  const hour = ranks[0].hour, names = Object.keys(ranks[0].tiers);
  const xs = hour.map((p) => p.time_unix_s);
  plot("hits", xs, names.map((label) => ({
    label, values: hour.map((p) => (p.prompt_tokens ? 100 * (p.hit_tokens[label] || 0) / p.prompt_tokens : null)),
  })), { y: { range: [0, 100] }, yValues: (_, v) => v.map((one) => one + " %"), value: (_, v) => v == null ? "" : v.toFixed(1) + " %" });
  const missed = added(ranks, (r) => Object.fromEntries(Object.entries((r.missed || { tokens: {} }).tokens).map(([k, row]) => [k, sum(Object.values(row))])));
  const all = sum(Object.values(missed));
  byId("missed").textContent = all ? "Missed so far: " + Object.entries(missed).sort((a, b) => b[1] - a[1])
    .map(([k, n]) => k.replaceAll("_", " ") + " " + percent(n, all)).join(", ") + "." : "";
  byId("auto").textContent = ranks.filter((r) => r.auto).map((r) => "auto: " + r.auto + ".").join(" ");
  const reasons = [...new Set(hour.flatMap((p) => Object.keys(p.evicted_tokens).filter((name) => p.evicted_tokens[name])))];
  if (only("evictions", reasons.length)) plot("evictions", xs, reasons.map((label) => ({ label, values: hour.map((p) => p.evicted_tokens[label] || 0) })),
    { y: { range: (_, low, high) => [0, 1.1 * high || 1] }, yValues: (_, v) => v.map(size), value: (_, v) => v == null ? "" : size(v) });
}

function curves(rank) {
  const all = Object.entries(rank.curves || {});
  const xs = all.length ? all[0][1].map((p) => Math.max(p[0], 0.5)) : [];
  if (only("curves", all.length)) plot("curves", xs, all.map(([label, points]) => ({ label, values: points.map((p) => p[1]) })), {
    x: { time: false, distr: 3, range: [xs[0], xs[xs.length - 1]] }, y: { range: [0, 1] }, xAxis: { values: (_, v) => v.map((s) => s == null ? "" : s < 1000 ? s : s / 1000 + "k") }, xSeries: { label: "age, s" },
    value: (_, v) => v == null ? "" : v.toFixed(3),
  });
}

function held(ranks) {
  const on = ["device", "host", "disk"].filter((t) => ranks.some((r) => r.categories.some((c) => t in c.held_tokens)));
  const sizes = (one) => on.map((t) => size(one[t]));
  const rows = {};
  for (const rank of ranks)
    for (const c of rank.categories) {
      const row = rows[c.category] ||= { requests: 0, prompts: 0, missed: 0, device: 0, host: 0, disk: 0 };
      row.requests += c.requests; row.prompts += c.prompt_tokens; row.missed += c.miss_tokens;
      for (const t of on) row[t] += c.held_tokens[t] || 0;
    }
  const named = Object.keys(rows);
  if (only("categories", named.length)) show("categories", table(["category", "~requests", "hit", ...on], Object.entries(rows)
    .sort((a, b) => b[1].prompts - a[1].prompts).slice(0, 16)
    .map(([name, r]) => [name, size(r.requests), percent(r.prompts - r.missed, r.prompts), ...sizes(r)])));
  const tenants = {};
  for (const rank of ranks)
    for (const t of rank.tenants || []) {
      const row = tenants[t.tenant ?? "public"] ||= { device: 0, host: 0, disk: 0 };
      for (const tier of on) row[tier] += t[tier] || 0;
    }
  if (only("tenants", Object.keys(tenants).some((name) => name !== "public")))
    show("tenants", table(["tenant", ...on], Object.entries(tenants)
    .map(([name, t]) => [name, ...sizes(t)])));
  const groups = ranks[0].groups.slice(0, 24);
  const of = (group, tier) => group.held_tokens && tier in group.held_tokens ? size(sum(ranks.map((r) => {
    const same = r.groups.find((g) => g.tier === group.tier && g.group === group.group);
    return (same && same.held_tokens ? same.held_tokens[tier] || 0 : 0);
  }))) : "-";
  if (only("groups", groups.length)) show("groups", table(["group", "~TTL on", "TTL", ...on], groups
    .map((g) => [g.name, g.tier, g.ttl_s === null ? "no expiry" : lasting(g.ttl_s), ...on.map((t) => of(g, t))])));
}

function firstTokens(status) {
  const hour = status.ttft_hour || [], time = lasting, last = hour.length && hour[hour.length - 1];
  show("waited", ...(last ? [node("span", time(last.p50_s), "big"), node("span", " is the median of the last minute; 99 in 100 are below " + time(last.p99_s))] : []));
  plot("ttft-hour", hour.map((p) => p.time_unix_s), [
    { label: "median", values: hour.map((p) => p.p50_s) }, { label: "99 in 100 below", values: hour.map((p) => p.p99_s) },
  ], { y: { range: (_, low, high) => [0, 1.1 * high || 1] }, yValues: (_, v) => v.map(time), value: (_, v) => v == null ? "" : time(v) });
  const line = status.ttft_model || {}, ms = (v) => time(v / 1000);
  byId("ttft").textContent = line.alpha_ms_per_1k_tokens == null ? "" : "Without the queue: " + ms(line.alpha_ms_per_1k_tokens) +
    " for each 1,000 new tokens, plus " + ms(line.beta_ms) + " (fitted to " + size(line.requests) + " requests).";
}

async function asked(path, headers = {}) {
  const answer = await fetch(path, { headers });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message || body.error || "status " + answer.status);
  return body;
}

async function refresh() {
  try {
    const status = await asked("status");
    const ranks = status.ranks;
    byId("what").textContent = "sglang-canopy " + status.version + ", policy " + (status.policy || "none") + ", up " +
      lasting(status.uptime_s) + (ranks.length > 1 ? ", " + ranks.length + " replicas" : "");
    byId("trouble").textContent = "";
    const next = status.next_step || "";
    if (byId("next").textContent !== next)
      show("next", ...next.split(/(--[a-z-]+)/).map((part, i) => i % 2 ? node("span", part, "flag") : part));
    whatIf(status.whatif);
    firstTokens(status);
    documents(status.documents);
    for (const id of ["hits", "tiers"]) only(id, ranks.length);
    if (ranks.length) { hits(ranks); tiers(ranks); held(ranks); curves(ranks[0]); }
    else for (const id of ["evictions", "categories", "tenants", "curves", "groups", "explained"]) only(id, false);
    reachable();
  } catch (error) {
    byId("trouble").textContent = "no news: " + error.message;
  }
}

function documents(now) {
  const of = Object.entries(now ? now.not_fused : {}).sort((a, b) => b[1] - a[1]);
  const prompts = now ? [["reused documents", now.fused_requests], ...of.slice(0, 5).map(([why, n]) => ["not reused: " + why, n])] : [];
  if (now && now.fallbacks) prompts.push(["failed, and computed as usual", now.fallbacks]);
  if (!only("documents", sum(prompts.map((p) => p[1])))) return;
  const quality = now.quality, unusual = Object.entries(quality.tenants || {}).filter(([, t]) => t.step !== "served");
  const held = Object.entries(now.store.tiers).map(([tier, t]) => bytes(t.used_bytes) + " in " + tier).join(", ");
  show("documents", table(["prompts", ""], prompts.map(([name, n]) => [name, size(n)])),
    node("p", "Tokens of documents: " + size(now.reused_tokens) + " reused, " + size(now.recomputed_tokens) + " computed again; stored: " + (held || "nothing") + "."),
    node("p", "Answers compared with full recompute: " + size(quality.checked) + ", of which " + size(quality.differed) + " differ. Tenants with a raised ratio: " +
      size(quality.tenants_raised) + ", with reuse stopped: " + size(quality.tenants_stopped) + "."),
    ...unusual.map(([name, t]) => node("p", "Tenant " + (name || "(none)") + ": " + t.step + ", " + size(t.differed) + " of " + size(t.checked) + " differ.")));
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const headers = {};
  if (byId("extra").value) headers["X-Canopy-Extra-Key"] = byId("extra").value;
  if (byId("salt").value) headers["X-Canopy-Cache-Salt"] = byId("salt").value;
  try {
    const answer = await asked("explain?conversation=" + encodeURIComponent(byId("conversation").value), headers);
    show("explained", ...answer.replicas.flat().flatMap(explained));
  } catch (error) { show("explained", node("p", error.message)); }
});

function explained(one) {
  const held = Object.entries(one.tokens).filter(([, n]) => n).map(([tier, n]) => tier + " " + n.toLocaleString()).join(", ");
  const turn = one.next_to_go, last = one.evicted[0], parts = [
    node("p", one.cached ? "Holds " + (held || "nothing") + " tokens; " + (one.last_use_ago_s == null ? "only the part shared with others." : "last used " + one.last_use_ago_s + " s ago.") : "Nothing of it is cached."),
  ];
  if (last)
    parts.push(node("p", "Evicted last, " + last.evicted_ago_s + " s ago: " + last.tokens.toLocaleString() + " tokens from " + last.offset.toLocaleString() +
      " on left the " + last.tier + ", by " + last.by + " (" + last.reason + "), unused for " + last.idle_s + " s" +
      (last.category ? ", as " + last.category : "") + "."));
  if (turn && turn.tokens_before !== null)
    parts.push(node("p", "Would be evicted after " + turn.tokens_before.toLocaleString() + " other tokens" +
      (turn.seconds === null ? "." : ", in about " + turn.seconds + " s at today's rate.")));
  if (Object.keys(one.belief).length)
    parts.push(node("p", one.policy + " estimates: " + Object.entries(one.belief).map(([k, v]) => k + " " + (typeof v === "number" ? +v.toPrecision(4) : v)).join(", ")));
  if (one.nodes.length) parts.push(table(["tokens", "tiers", "category", "last use, s", "uses"], one.nodes
    .map((n) => [n.offset + " .. " + (n.offset + n.tokens), n.tiers.join(" + "), n.category, n.last_use_ago_s, n.uses])));
  if (one.evicted.length) parts.push(node("h2", "Evicted"), table(["s ago", "tier", "from", "tokens", "by", "reason", "unused for, s"],
    one.evicted.map((e) => [e.evicted_ago_s, e.tier, e.offset, e.tokens, e.by, e.reason, e.idle_s])));
  return parts;
}

function fromAddress() {  // what is after the # stays in the browser
  const name = new URLSearchParams(location.hash.slice(1)).get("conversation");
  if (name) { byId("conversation").value = name; byId("ask").requestSubmit(); }
}
addEventListener("hashchange", fromAddress);

refresh();
fromAddress();
setInterval(refresh, EVERY_MS);
