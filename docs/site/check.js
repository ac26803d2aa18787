"use strict";
/* A second checker of certificates, without the first one's code, language or libraries.

It was written from docs/formulations.md and docs/files.md. It runs in a browser (docs/howto/check.md) and in
Node: node docs/site/check.js INSTANCE CERTIFICATE. Numbers are BigInt wherever a claim depends on them. Floating point
only says which moments need no look, or counts integers below 2**53.

It covers, on one machine: in rounds the leaves prices, pairs, lengths and ramp, and optimal schedules; in seconds work and
busy-time. Everything else is refused by name, which says nothing about its truth. */
(function (root) {

class Refused extends Error {}
const need = (right, text) => { if (!right) throw new Refused(text); };
const most = (a, b) => (a > b ? a : b);
const least = (a, b) => (a < b ? a : b);
const sum = (list) => list.reduce((a, b) => a + b, 0n);
const ascending = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
const down = (a, b) => { const q = a / b; return a % b !== 0n && (a < 0n) !== (b < 0n) ? q - 1n : q; };
const up = (a, b) => -down(-a, b);
const gcd = (a, b) => { while (b) [a, b] = [b, a % b]; return a; };
const fields = (value, names, place) => {
  const right = value && typeof value === "object" && !Array.isArray(value);
  need(right && Object.keys(value).sort().join() === [...names].sort().join(), `${place}: found other fields`);
};
const whole = (value, place) => {
  need(typeof value === "bigint" && value < 1n << 1024n && value > -(1n << 1024n), `${place}: expected an integer`);
  return value;
};
const wholes = (value, place, count) => {
  need(Array.isArray(value), `${place}: expected a list`);
  need(count === undefined || value.length === count, `${place}: expected ${count} integers`);
  return value.map((one) => whole(one, place));
};

function root2(value) { // the largest integer whose square is at most value
  if (value < 2n) return value;
  let x = 1n << BigInt((value.toString(2).length + 1) >> 1);
  for (;;) {
    const y = (x + value / x) >> 1n;
    if (y >= x) return x;
    x = y;
  }
}

/* ---- JSON that keeps integers apart from other numbers, and digests ---- */

function parse(text) {
  const token = /\s*([[\]{}:,]|"(?:[^"\\\u0000-\u001f]|\\.)*"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)\s*/y;
  const next = () => {
    const found = token.exec(text);
    need(found, "found no JSON");
    return found[1];
  };
  const value = (one, depth) => {
    need(depth < 60, "found JSON too deep");
    if (one === "[") {
      const list = [];
      let mark = next();
      if (mark === "]") return list;
      for (; ; mark = next()) {
        list.push(value(mark, depth + 1));
        mark = next();
        if (mark === "]") return list;
        need(mark === ",", "found no JSON");
      }
    }
    if (one === "{") {
      const object = Object.create(null);
      let mark = next();
      if (mark === "}") return object;
      for (; ; mark = next()) {
        need(mark[0] === '"', "found no JSON");
        const key = JSON.parse(mark);
        need(!(key in object), `found ${key} twice`);
        need(next() === ":", "found no JSON");
        object[key] = value(next(), depth + 1);
        mark = next();
        if (mark === "}") return object;
        need(mark === ",", "found no JSON");
      }
    }
    need(!"]}:,".includes(one), "found no JSON");
    if (/^-?\d+$/.test(one)) return BigInt(one);
    const plain = JSON.parse(one);
    need(typeof plain !== "number" || Number.isFinite(plain), "found a number that is too large");
    return plain;
  };
  const found = value(next(), 0);
  need(token.lastIndex === text.length, "found more than one JSON value");
  return found;
}

function decimalText(x) { // the shortest digits, written as Python writes them
  const [digits, power] = x.toExponential().split("e"), e = Number(power);
  if (e >= -4 && e < 16) return Number.isInteger(x) ? `${BigInt(x)}.0` : x.toFixed(Math.max(0, digits.replace(/[-.]/g, "").length - 1 - e));
  return `${digits}e${e < 0 ? "-" : "+"}${String(Math.abs(e)).padStart(2, "0")}`;
}

function canonical(value) { // sorted keys, no spaces, ASCII
  if (typeof value === "bigint") return value.toString();
  if (typeof value === "number") return decimalText(value);
  if (Array.isArray(value)) return `[${value.map(canonical).join()}]`;
  if (value === null || typeof value !== "object") {
    return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  }
  return `{${Object.keys(value).sort().map((key) => `${canonical(key)}:${canonical(value[key])}`).join()}}`;
}

function sha256(text) {
  const primes = [];
  for (let k = 2; primes.length < 64; k++) if (primes.every((p) => k % p)) primes.push(k);
  const bits = (x) => ((x - Math.floor(x)) * 2 ** 32) >>> 0;
  const key = primes.map((p) => bits(Math.cbrt(p))), hash = primes.slice(0, 8).map((p) => bits(Math.sqrt(p)));
  const bytes = new Uint8Array(((text.length + 72) >> 6) << 6), view = new DataView(bytes.buffer);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  bytes[text.length] = 128;
  view.setBigUint64(bytes.length - 8, BigInt(text.length) * 8n);
  const turn = (x, k) => (x >>> k) | (x << (32 - k)), w = new Int32Array(64);
  for (let at = 0; at < bytes.length; at += 64) {
    for (let k = 0; k < 64; k++) {
      if (k < 16) w[k] = view.getInt32(at + 4 * k);
      else {
        const x = w[k - 15], y = w[k - 2];
        w[k] = w[k - 16] + w[k - 7] + (turn(x, 7) ^ turn(x, 18) ^ (x >>> 3)) + (turn(y, 17) ^ turn(y, 19) ^ (y >>> 10));
      }
    }
    let [a, b, c, d, e, f, g, h] = hash;
    for (let k = 0; k < 64; k++) {
      const one = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + key[k] + w[k]) | 0;
      const two = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((x, k) => { hash[k] = (hash[k] + x) | 0; });
  }
  return hash.map((x) => (x >>> 0).toString(16).padStart(8, "0")).join("");
}

/* ---- the instance ---- */

const SILENT = ["predicted", "predicted_lower", "predicted_upper", "forecast", "slo_ttft", "slo_tpot", "slo_gap", "slo_latency", "id", "weight"];

function readInstance(data) {
  const plain = (x) => (typeof x === "number" && Number.isInteger(x) ? BigInt(x) : x);
  const kept = (object) => {
    need(object && typeof object === "object" && !Array.isArray(object), "instance: expected a JSON object");
    const out = Object.create(null);
    for (const key of Object.keys(object)) if (object[key] !== null) out[key] = plain(object[key]);
    return out;
  };
  const all = kept(data), requests = kept(all.requests), limits = kept(all.limits || {});
  need(all.format === "optsched-instance" && all.version === 1n, "instance: expected format optsched-instance, version 1");
  const known = ["format", "version", "name", "time_unit", "kv_capacity", "kv_accounting", "kv_block_tokens", "limits",
    "hybrid_batching", "chunked_prefill", "requests", "known", "clients"];
  for (const key of Object.keys(all)) need(known.includes(key), `instance: this checker does not cover ${key}`);
  for (const key of Object.keys(requests)) {
    need(["arrival", "prompt_tokens", "output_tokens", ...SILENT].includes(key), `instance: this checker does not cover ${key}`);
    if (Array.isArray(requests[key])) requests[key] = requests[key].map(plain);
  }
  for (const key of ["name", "known", "clients"]) delete all[key];
  delete requests.id;
  if (all.kv_block_tokens === 1n) delete all.kv_block_tokens;
  all.requests = requests;
  all.limits = limits;
  if (!Object.keys(limits).length) delete all.limits;

  const rounds = all.time_unit === "round", { arrival } = requests, n = Array.isArray(arrival) ? arrival.length : 0;
  need(rounds || all.time_unit === "second", "instance: time_unit: expected round or second");
  need(n > 0 && arrival.every((a) => typeof a === "bigint" || (!rounds && typeof a === "number")), "instance: arrival: expected numbers");
  const prompt = wholes(requests.prompt_tokens, "prompt_tokens", n), output = wholes(requests.output_tokens, "output_tokens", n);
  const capacity = whole(all.kv_capacity, "kv_capacity"), generated = all.kv_accounting === "generated";
  need(generated || all.kv_accounting === "cached", "instance: kv_accounting: expected generated or cached");
  const offset = generated ? 1n : 0n, cap = {};
  for (const [name, value] of Object.entries(limits)) {
    need(["max_batch_tokens", "max_prefill_tokens", "max_running"].includes(name), `instance: this checker does not cover ${name}`);
    need(whole(value, name) >= 1n, `instance: ${name}: expected an integer >= 1`);
    cap[name] = value;
  }
  for (let i = 0; i < n; i++) {
    need(prompt[i] >= 1n && output[i] >= 1n, `instance: request ${i}: expected tokens >= 1`);
    need(prompt[i] + output[i] + offset - 1n <= capacity, `instance: request ${i}: found one that never fits`);
  }
  return { digest: sha256(canonical(all)), rounds, n, arrival, prompt, output, capacity, offset, limits: cap, weight: requests.weight,
    block: all.kv_block_tokens || 1n, hybrid: all.hybrid_batching !== false, chunked: all.chunked_prefill !== false };
}

/* Shortest remaining processing time on one preemptive machine: its ends, ascending (Schrage 1968). */
function srpt(jobs) {
  const coming = [...jobs].sort((x, y) => ascending(x[0], y[0]) || ascending(x[1], y[1])), ends = [];
  const waiting = []; // what is left of jobs at hand, the shortest one last
  let now = 0n, at = 0;
  const put = (rest) => {
    let low = 0, high = waiting.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (waiting[middle] > rest) low = middle + 1; else high = middle;
    }
    waiting.splice(low, 0, rest);
  };
  while (at < coming.length || waiting.length) {
    if (!waiting.length) now = most(now, coming[at][0]);
    while (at < coming.length && coming[at][0] <= now) put(coming[at++][1]);
    const rest = waiting.pop(), until = at < coming.length ? coming[at][0] : null;
    if (until !== null && now + rest > until) {
      put(now + rest - until);
      now = until;
    } else ends.push(now += rest);
  }
  return ends;
}

/* ---- leaves in rounds ---- */

/* D TEL >= sum of min f_i(k) - M sum p_t. Between the starts at which a first or last round enters another piece f is a
quadratic, so it is least at an end or where its difference changes its sign. */
function prices(problem, leaf, unit) {
  fields(leaf, ["relaxation", "from_round", "price"], "prices");
  const from = wholes(leaf.from_round, "from_round"), price = wholes(leaf.price, "price", from.length);
  need(from.length && from[0] >= 1n && from.every((t, k) => !k || from[k - 1] < t), "from_round: expected ascending rounds >= 1");
  need(from[from.length - 1] < 1n << 60n, "from_round: expected rounds below 2**60");
  need(price.every((p) => p >= 0n) && price[price.length - 1] === 0n, "price: expected prices >= 0, the last one 0");
  const begin = [0n, ...from], paid = [0n, ...price], sums = [0n], moments = [0n];
  for (let k = 0; k < from.length; k++) {
    const rounds = begin[k + 1] - begin[k];
    sums.push(sums[k] + rounds * paid[k]);
    moments.push(moments[k] + paid[k] * ((begin[k] + begin[k + 1] - 1n) * rounds / 2n));
  }
  const upto = (t) => { // sums of price and of round * price up to round t
    let low = 0, high = begin.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (begin[middle] <= t) low = middle; else high = middle - 1;
    }
    const rounds = t + 1n - begin[low];
    return [sums[low] + rounds * paid[low], moments[low] + paid[low] * ((begin[low] + t) * rounds / 2n)];
  };
  let total = -problem.capacity * sums[from.length];
  for (let i = 0; i < problem.n; i++) {
    const a = problem.arrival[i], o = problem.output[i], q = problem.prompt[i] + problem.offset - 1n;
    const cost = (k) => {
      const [p0, m0] = upto(k), [p1, m1] = upto(k + o);
      return unit * (k + o - a) + (q - k) * (p1 - p0) + m1 - m0;
    };
    const turns = new Set([a]);
    for (const b of from) for (const k of [b - 1n, b - o]) if (k > a) turns.add(k);
    const starts = [...turns].sort(ascending);
    let best = cost(a);
    for (let j = 0; j < starts.length; j++) {
      let low = starts[j];
      if (unit * (low + o - a) >= best) break;
      best = least(best, cost(low));
      if (j + 1 === starts.length) break; // prices are 0 from here on
      let high = starts[j + 1] - 1n;
      best = least(best, cost(high));
      if (high - low < 2n || cost(low + 1n) >= cost(low) || cost(high) <= cost(high - 1n)) continue;
      while (high - low > 1n) { // the difference rises from below 0 to above
        const middle = (low + high) / 2n;
        if (cost(middle + 1n) < cost(middle)) low = middle; else high = middle;
      }
      best = least(best, least(cost(low), cost(high)));
      best = least(best, cost(high + 1n));
    }
    total += best;
  }
  return up(total, unit);
}

/* Ends of requests with peaks of h or more, 2h > M, lie d_j = min(o_j, p_j + h - M) apart. */
function pairs(problem, leaf) {
  fields(leaf, ["relaxation", "threshold"], "pairs");
  const h = whole(leaf.threshold, "threshold"), jobs = [];
  need(2n * h > problem.capacity, "threshold: expected more than half of the capacity");
  let total = 0n;
  for (let i = 0; i < problem.n; i++) {
    const a = problem.arrival[i], o = problem.output[i], peak = problem.prompt[i] + problem.offset - 1n + o;
    if (peak < h) total += o;
    else {
      const apart = least(o, peak + h - problem.capacity);
      jobs.push([a + o - apart, apart]);
      total -= a;
    }
  }
  return total + sum(srpt(jobs));
}

/* Lists of lengths such that no walk from no requests to none places more than it has steps. */
function lengths(problem, leaf, unit) {
  fields(leaf, ["relaxation", "every", "floor", "lengths"], "lengths");
  const every = whole(leaf.every, "every"), floor = whole(leaf.floor, "floor"), { n, arrival, output } = problem;
  need(every >= 1n && floor >= 1n && unit < 1n << 40n, "lengths: found numbers out of range");
  need(Array.isArray(leaf.lengths) && leaf.lengths.length && leaf.lengths.length <= 64, "lengths: expected 1 to 64 lists");
  const kinds = [], number = new Map(), of = [];
  for (let i = 0; i < n; i++) {
    const marks = output[i] / every, tokens = down(problem.prompt[i] + problem.offset + output[i] - every, every);
    const forgotten = least(up(most(tokens - marks, 1n), floor) * floor, tokens - 1n);
    of.push(marks > 0n && tokens > floor ? [Number(tokens), Number(forgotten)] : null);
  }
  for (const one of of) if (one && !number.has(one.join())) { number.set(one.join(), 0); kinds.push(one); }
  kinds.sort((x, y) => x[0] - y[0] || x[1] - y[1]);
  kinds.forEach((one, k) => number.set(one.join(), k));

  const room = Number(problem.capacity / every), states = [[]], seen = new Map([["", 0]]), earlier = [], arcs = [];
  const at = (state) => {
    state.sort((x, y) => x[0] - y[0] || x[1] - y[1]);
    const name = state.join(";");
    if (!seen.has(name)) { seen.set(name, states.length); states.push(state); }
    return seen.get(name);
  };
  for (let s = 0; s < states.length; s++) {
    need(states.length <= 20000, "lengths: found more than 20000 states; too large to check");
    const left = room - states[s].reduce((x, [tokens]) => x + tokens, 0);
    earlier.push(at(states[s].filter(([t, f]) => t - 1 > f).map(([t, f]) => [t - 1, f])));
    arcs.push(kinds.flatMap((kind, k) => (kind[0] <= left ? [[k, at([...states[s], kind])]] : [])));
  }

  let ends = [...arrival.keys()].map((i) => arrival[i] + output[i]).sort(ascending);
  const held = (i) => problem.prompt[i] + problem.offset - 1n;
  const volume = srpt(arrival.map((a, i) => [a * problem.capacity, held(i) * output[i] + output[i] * (output[i] + 1n) / 2n]));
  ends = ends.map((end, k) => most(end, up(volume[k], problem.capacity)));
  leaf.lengths.forEach((list, number_) => {
    const given = wholes(list, `list ${number_}`, kinds.length);
    need(given.every((w) => w >= 0n && w <= 1n << 40n), `list ${number_}: found a length out of range`);
    const w = given.map(Number), step = Number(unit), surplus = new Array(states.length).fill(-Infinity);
    surplus[0] = 0;
    for (let turn = 0, risen = true; risen; turn++) {
      need(turn <= states.length && surplus[0] === 0, `list ${number_}: found a walk of fewer steps`);
      risen = false;
      for (let s = states.length - 1; s >= 0; s--) {
        let best = surplus[earlier[s]] - step;
        for (const [k, target] of arcs[s]) best = Math.max(best, surplus[target] + w[k]);
        need(!(Math.abs(best) >= 2 ** 53) || best === -Infinity, "lengths: found sums beyond 2**53; too large to check");
        if (best > surplus[s]) { surplus[s] = best; risen = true; }
      }
    }
    const jobs = of.map((one, i) => {
      const gone = one ? every * BigInt(one[0] - one[1]) : 0n;
      return [(arrival[i] + output[i] - gone) * unit, one ? every * given[number.get(one.join())] : 0n];
    });
    srpt(jobs).forEach((end, k) => { ends[k] = most(ends[k], up(end, unit)); });
  });
  return sum(ends) - sum(arrival);
}

/* The value of a schedule of starts, whose limits are looked at round by round where anything changes. */
function scheduled(problem, schedule, digest) {
  fields(schedule, ["format", "version", "instance_sha256", "kind", "starts"], "schedule");
  const head = canonical([schedule.format, schedule.version, schedule.kind, schedule.instance_sha256]);
  need(head === canonical(["optsched-schedule", 1n, "starts", digest]), "schedule: found another head");
  const { n, arrival, prompt, output, limits } = problem, starts = wholes(schedule.starts, "starts", n), rounds = new Set();
  for (let i = 0; i < n; i++) {
    need(starts[i] >= arrival[i], `schedule: request ${i}: found a start before its arrival`);
    for (const t of [starts[i] + 1n, starts[i] + 2n, starts[i] + output[i]]) rounds.add(t); // KV only rises between ends
    if (problem.block > 1n) for (let j = 3n; j < output[i]; j++) rounds.add(starts[i] + j);
  }
  for (const t of rounds) {
    let kv = 0n, running = 0n, first = 0n, later = 0n;
    for (let i = 0; i < n; i++) {
      if (t <= starts[i] || t > starts[i] + output[i]) continue;
      const held = prompt[i] + problem.offset - 1n + t - starts[i];
      kv += up(held, problem.block) * problem.block;
      running += 1n;
      if (t === starts[i] + 1n) first += prompt[i]; else later += 1n;
    }
    const within = (name, use) => need(limits[name] === undefined || use <= limits[name], `schedule: round ${t}: found ${use}, beyond ${name}`);
    need(kv <= problem.capacity, `schedule: round ${t}: found ${kv} KV tokens, beyond the capacity`);
    within("max_running", running);
    within("max_batch_tokens", first + later);
    within("max_prefill_tokens", first);
    need(problem.hybrid || !first || !later, `schedule: round ${t}: found a batch of both phases`);
  }
  return sum(starts.map((k, i) => k + output[i] - arrival[i]));
}

/* ---- the ramp relaxation: paths from the last round back to the first ---- */

const NODES = 3e6, ARCS = 2e7; // what a browser holds

/* Nodes in an order in which arcs ascend; the last one is the end. A node with a `loop` of m stays as it is in a round,
which costs m. What an arc does: it passes rounds at a cost, or places one of some kinds. */
class Graph {
  constructor() { Object.assign(this, { first: [0], target: [], does: [], loop: [], deeds: [], number: new Map() }); }

  deed(what, rounds, kinds = null) {
    const name = `${what}${rounds}:${kinds}`;
    if (!this.number.has(name)) { this.number.set(name, this.deeds.length); this.deeds.push({ what, rounds, kinds }); }
    return this.number.get(name);
  }

  add(arcs, loop) {
    for (const [target, deed] of arcs) { this.target.push(target); this.does.push(deed); }
    need(this.target.length < ARCS && this.loop.length < NODES, "ramp: found a level that is too large for this checker");
    this.first.push(this.target.length);
    this.loop.push(loop);
  }

  toEnd(pi, unit) { // the least cost from each node to the end
    const n = this.loop.length, rest = new Float64Array(n).fill(Infinity);
    const price = this.deeds.map(({ rounds, kinds }) => rounds * unit - (kinds ? Math.max(...kinds.map((k) => pi[k])) : 0));
    rest[n - 1] = 0;
    for (let u = n - 2; u >= 0; u--) {
      for (let a = this.first[u]; a < this.first[u + 1]; a++) rest[u] = Math.min(rest[u], rest[this.target[a]] + price[this.does[a]]);
    }
    return rest;
  }
}

/* Of each m a node without a clock, then of each round t, from the clock's last one down to 0. By t no more requests have
completed than are ready and whose KV fits. */
function clocked(kinds, copies, capacity, clock) {
  const graph = new Graph(), n = copies.reduce((x, y) => x + y, 0), rounds = clock ? clock + 1 : 0, fewest = [];
  const ready = kinds.map(([a, p, f]) => a + p - f + 1);
  const sizes = kinds.map(([, p, f], k) => [(p - f + 1) * (p + f) / 2, k]).sort((x, y) => x[0] - y[0]);
  for (let t = 0; t < rounds; t++) {
    let used = 0, count = 0;
    for (const [size, k] of sizes) for (let c = 0; ready[k] <= t && c < copies[k]; c++) if ((used += size) <= capacity * t) count++;
    fewest.push(n - count);
  }
  const begins = [];
  for (let t = rounds - 1, at = n + 1; t >= 0; t--) { begins[t] = at; at += n + 1 - fewest[t]; }
  const end = n + 1 + fewest.reduce((x, m) => x + n + 1 - m, 0), all = kinds.map((_, k) => k);
  for (let m = 0; m <= n; m++) {
    const arcs = m < n ? [[m + 1, graph.deed("place", 0, all)]] : [];
    if (rounds && m >= fewest[clock]) arcs.push([begins[clock] + m - fewest[clock], graph.deed("join", 0)]);
    if (m === n && !rounds) arcs.push([end, graph.deed("end", 0)]);
    graph.add(arcs, m || -1);
  }
  for (let t = rounds - 1; t >= 0; t--) {
    const able = all.filter((k) => ready[k] <= t);
    for (let m = fewest[t]; m <= n; m++) {
      const arcs = m < n && able.length ? [[begins[t] + m + 1 - fewest[t], graph.deed("place", 0, able)]] : [];
      if (m === n) arcs.push([end, graph.deed("end", n * t)]);
      if (t && m >= fewest[t - 1]) arcs.push([begins[t - 1] + m - fewest[t - 1], graph.deed("round", m)]);
      graph.add(arcs, -1);
    }
  }
  graph.add([], -1);
  return graph;
}

/* Multisets of live items (tokens, floor), or one state that knows nothing. States are numbers. */
function tracker(kinds, copies, capacity, floors) {
  const states = [], number = new Map(), after = [], before = [], weight = [];
  const at = (state) => {
    const name = state.join(";");
    if (!number.has(name)) {
      number.set(name, states.length);
      states.push(state);
      after.push(new Int32Array(kinds.length).fill(-2));
      before.push(-2);
      weight.push(state.reduce((x, [w]) => x + w, 0));
    }
    return number.get(name);
  };
  const place = (s, k) => {
    const peak = kinds[k][1], floor = floors[k];
    if (weight[s] + peak > capacity) return -1;
    if (peak < floor) return s; // it must fit, and is gone
    const state = [...states[s], [peak, floor]].sort((x, y) => y[0] - x[0] || y[1] - x[1]);
    let count = 0; // of a class no more are as heavy as an item than there are requests with such peaks
    for (const [w, own] of state) {
      if (own !== floor) continue;
      count++;
      if (count > kinds.reduce((x, [, p], j) => x + (floors[j] === floor && p >= w ? copies[j] : 0), 0)) return -1;
    }
    return at(state);
  };
  at([]);
  if (!floors) return { place: (s) => s, step: (s) => s, empty: () => true, weight };
  return {
    place: (s, k) => { if (after[s][k] === -2) { const found = place(s, k); after[s][k] = found; } return after[s][k]; },
    step: (s) => { if (before[s] === -2) { const found = at(states[s].filter(([w, f]) => w > f).map(([w, f]) => [w - 1, f])); before[s] = found; } return before[s]; },
    empty: (s) => !states[s].length, weight,
  };
}

/* The paths that a graph and a tracker allow and that may cost `cutoff`; null if there are none. `rest` is what the graph
says of the cost to the end, null at first. */
function refined(graph, states, rest, pi, cutoff, unit) {
  const out = new Graph(), cost = [], place = [], here = new Array(graph.loop.length), last = graph.loop.length - 1;
  const node = (u, s) => {
    const mine = here[u] = here[u] || new Map();
    if (!mine.has(s)) { mine.set(s, cost.length); cost.push(Infinity); place.push(-1); }
    return mine.get(s);
  };
  let mine;
  cost[node(0, 0)] = 0;
  for (let u = 0; u <= last; u++) {
    mine = here[u] = here[u] || new Map();
    const loop = graph.loop[u], order = [...mine.keys()];
    if (loop >= 0) {
      for (let k = 0; k < order.length; k++) {
        const lighter = states.step(order[k]);
        if (!mine.has(lighter)) { node(u, lighter); order.push(lighter); }
      }
      order.sort((x, y) => states.weight[y] - states.weight[x]);
    }
    for (const s of order) {
      const x = mine.get(s), spent = cost[x], moves = loop >= 0 && states.step(s) !== s, arcs = [];
      place[x] = out.loop.length;
      const go = (v, to, price, deed) => {
        const y = node(v, to);
        cost[y] = Math.min(cost[y], spent + price);
        arcs.push([y, deed]);
      };
      if (spent < Infinity) {
        const within = (v, price) => !rest || spent + rest[v] + price <= cutoff;
        if (moves && within(u, loop * unit)) go(u, states.step(s), loop * unit, out.deed("round", loop));
        for (let a = graph.first[u]; a < graph.first[u + 1]; a++) {
          const v = graph.target[a], { what, rounds, kinds } = graph.deeds[graph.does[a]];
          if (kinds) {
            const lead = new Map();
            for (const k of kinds) {
              const to = within(v, -pi[k]) ? states.place(s, k) : -1;
              if (to >= 0) lead.set(to, [...(lead.get(to) || []), k]);
            }
            for (const [to, some] of lead) go(v, to, -Math.max(...some.map((k) => pi[k])), out.deed("place", 0, some));
          } else if (within(v, rounds * unit) && (what !== "end" || states.empty(s))) {
            go(v, what === "round" ? states.step(s) : s, rounds * unit, out.deed(what, rounds));
          }
        }
      }
      out.add(arcs, moves ? -1 : loop);
    }
    if (u < last) here[u] = undefined;
  }
  if (!mine.size) return null;
  out.target = out.target.map((x) => place[x]);
  return out;
}

/* Whether no schedule costs `cutoff` or less: all are followed, with exact memory and every request once. */
function noneLeft(graph, rest, pi, cutoff, unit, { kinds, copies, capacity }) {
  const n = copies.reduce((x, y) => x + y, 0), here = new Array(graph.loop.length);
  let labels = 0;
  const put = (u, cost, placed, live) => {
    if (cost + rest[u] > cutoff) return;
    const mine = here[u] = here[u] || new Map(), name = `${placed}|${live.join(";")}`, known = mine.get(name);
    if (known && known.cost <= cost) return;
    if (!known) need(++labels < 1e6, "ramp: found too many schedules to enumerate; too large for this checker");
    mine.set(name, { cost, placed, live });
  };
  const step = (live) => live.filter(([w, k]) => w > kinds[k][2]).map(([w, k]) => [w - 1, k]);
  put(0, 0, kinds.map(() => 0), []);
  for (let u = 0; u < graph.loop.length; u++) {
    const loop = graph.loop[u], mine = here[u] || new Map();
    if (u === graph.loop.length - 1) return mine.size === 0;
    const held = ({ live }) => live.reduce((x, [w]) => x + w, 0), all = loop >= 0 ? new Map() : null;
    const take = ({ cost, placed, live }) => {
      for (let a = graph.first[u]; a < graph.first[u + 1]; a++) {
        const v = graph.target[a], { what, rounds, kinds: some } = graph.deeds[graph.does[a]];
        if (some) {
          const room = capacity - held({ live });
          for (const k of some) {
            if (placed[k] === copies[k] || kinds[k][1] > room) continue;
            put(v, cost - pi[k], placed.map((x, j) => (j === k ? x + 1 : x)), [...live, [kinds[k][1], k]].sort((x, y) => y[0] - x[0] || x[1] - y[1]));
          }
        } else if (what === "round") put(v, cost + rounds * unit, placed, step(live));
        else if (what === "join") put(v, cost, placed, live);
        else if (!live.length && placed.reduce((x, y) => x + y, 0) === n) put(v, cost + rounds * unit, placed, live);
      }
    };
    for (let label of mine.values()) {
      for (;;) {
        if (all) {
          const name = `${label.placed}|${label.live.join(";")}`;
          if (all.has(name) && all.get(name) <= label.cost) break;
          all.set(name, label.cost);
        }
        take(label);
        if (loop < 0 || !label.live.length) break;
        label = { cost: label.cost + loop * unit, placed: label.placed, live: step(label.live) };
        if (label.cost + rest[u] > cutoff) break;
      }
    }
    here[u] = undefined;
  }
  return true;
}

function ramp(problem, leaf) {
  fields(leaf, ["relaxation", "periods"], "ramp");
  const order = [...problem.arrival.keys()].sort((i, j) => ascending(problem.arrival[i], problem.arrival[j]) || i - j), groups = [];
  let latest = 0n, outputs = 0n, origin = 0n;
  for (const i of order) { // where all earlier ones have ended, one after another, a period begins
    const a = problem.arrival[i], o = problem.output[i], floor = problem.prompt[i] + problem.offset;
    if (!groups.length || a >= latest + outputs) { groups.push([]); outputs = 0n; origin = a; }
    groups[groups.length - 1].push([a - origin, floor + o - 1n, floor]);
    latest = a;
    outputs += o;
  }
  need(Array.isArray(leaf.periods) && leaf.periods.length === groups.length, `periods: expected ${groups.length}`);
  return sum(groups.map((requests, k) => period(requests, leaf.periods[k], problem.capacity)));
}

function period(requests, given, M) {
  fields(given, ["value", "denominator", "clock", "levels"], "period");
  const value = whole(given.value, "value"), clock = whole(given.clock, "clock"), { levels } = given, n = BigInt(requests.length);
  let unit = whole(given.denominator, "denominator");
  need(unit >= 1n && clock >= 0n && Array.isArray(levels) && levels.length <= 1000, "period: found a number out of range");
  const sorted = [...requests].sort((x, y) => ascending(x[0], y[0]) || ascending(x[1], y[1]) || ascending(x[2], y[2]));
  const kinds = sorted.filter((one, k) => !k || one.join() !== sorted[k - 1].join()), of = new Map(kinds.map((one, k) => [one.join(), k]));
  const kindOf = requests.map((one) => of.get(one.join())), copies = kinds.map((_, k) => kindOf.filter((j) => j === k).length);
  const byKind = (list, place) => {
    if (list === null) return null;
    const values = wholes(list, place, requests.length), found = kinds.map((_, k) => values[kindOf.indexOf(k)]);
    need(values.every((x, i) => x === found[kindOf[i]]), `${place}: found different ones of equal requests`);
    return found;
  };
  const lastArrival = kinds[kinds.length - 1][0], outputs = sum(requests.map(([, p, f]) => p - f + 1n)), arrivals = sum(requests.map(([a]) => a));
  const steps = levels.map((level, k) => {
    fields(level, ["floors", "counters", "multipliers"], "level");
    need(Array.isArray(level.counters) && !level.counters.length, "counters: expected none");
    const floors = byKind(level.floors, "floors"), pi = byKind(level.multipliers, "multipliers");
    need(!floors || floors.every((f, j) => f >= kinds[j][2]), "floors: found one that is too small");
    need(pi || (k && k === levels.length - 1 && !floors), "multipliers: expected a list");
    need(pi || lastArrival === 0n || clock > 0n, "clock: found none; expected one to enumerate schedules");
    return { floors, pi };
  });
  if (!steps.length) return least(value, outputs);
  need(clock <= kinds.reduce((x, [a, p, f]) => most(x, a + p - f + 1n), 0n), "clock: found one that is too long");
  const common = steps.reduce((x, { pi }) => (pi || []).reduce((y, z) => gcd(y, z < 0n ? -z : z), x), unit);
  unit /= common;
  for (const one of steps) one.pi = one.pi && one.pi.map((x) => x / common);
  const limit = least(value, n * (lastArrival + outputs) + 1n), highest = steps.reduce((x, { pi }) => (pi || []).reduce((y, z) => most(y, z < 0n ? -z : z), x), 0n);
  const rounds = (n + 1n) * (most(M, 0n) + 1n) + clock + outputs + arrivals; // in floating point integers below 2**53 are exact
  need(2n * n * (rounds * unit + highest) < 1n << 52n, "ramp: found numbers of too many digits for this checker");
  const plain = { kinds: kinds.map((one) => one.map(Number)), copies, capacity: Number(M) }, step = Number(unit);
  let graph = clocked(plain.kinds, copies, plain.capacity, Number(clock)), rest = null, pi = kinds.map(() => 0n), proved = outputs;
  const offset = () => sum(pi.map((x, k) => x * BigInt(copies[k])));
  for (const { floors, pi: next } of steps) {
    const cutoff = Number((limit - 1n + arrivals) * unit - offset()), now = pi.map(Number);
    if (!next) {
      need(noneLeft(graph, rest, now, cutoff, step, plain), `ramp: found a schedule below ${value}`);
      return limit;
    }
    graph = refined(graph, tracker(plain.kinds, copies, plain.capacity, floors && floors.map((f) => Number(least(f, M + 1n)))), rest, now, cutoff, step);
    if (!graph) return limit;
    pi = next;
    rest = graph.toEnd(pi.map(Number), step);
    if (rest[0] === Infinity) return limit;
    proved = up(BigInt(rest[0]) + offset(), unit) - arrivals;
  }
  return least(limit, proved);
}

/* ---- leaves in seconds ---- */

const TERMS = ["token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square", "prefill_cross", "prefill_kv",
  "prefill_token", "prefill_request", "prefill_base"];

/* Coefficients as integers in units of 1 / scale s, which M, P and 2 divide. */
function ratesOf(problem, model) {
  fields(model, ["layers", "coefficients"], "cost_model: this checker does not cover tables");
  const layers = whole(model.layers, "layers"), cost = {}, exact = {};
  need(layers >= 1n && layers <= 10000n, "layers: expected 1 to 10000");
  let common = 1n;
  for (const name of TERMS) exact[name] = [0n, 1n];
  fields(model.coefficients, Object.keys(model.coefficients || {}), "cost_model: coefficients");
  for (const [name, text] of Object.entries(model.coefficients)) {
    const found = typeof text === "string" && /^(\d{1,40})(?:\.(\d{0,60}))?(?:[eE]([+-]?\d{1,2}))?$/.exec(text);
    need(found, `cost_model: ${name}: expected a decimal text >= 0`);
    const power = Number(found[3] || 0) - (found[2] || "").length, digits = BigInt(found[1] + (found[2] || ""));
    const value = [digits * 10n ** BigInt(Math.max(power, 0)), 10n ** BigInt(Math.max(-power, 0))];
    need(value[0] <= 1000000n * value[1], `cost_model: ${name}: expected at most 10**6`);
    need(digits === 0n || TERMS.includes(name), `cost_model: ${name}: nothing is proved for it`);
    if (!TERMS.includes(name)) continue;
    const part = gcd(value[0], value[1]);
    exact[name] = value.map((x) => x / part);
    common = common / gcd(common, exact[name][1]) * exact[name][1];
  }
  need(exact.base[0] + exact.token[0] > 0n, "cost_model: expected batches that take time");
  const { max_batch_tokens: batch, max_prefill_tokens: prefill } = problem.limits;
  const cap = [batch, prefill].reduce((x, y) => (y === undefined ? x : least(x, y)), problem.capacity);
  const fine = 2n * (problem.capacity / gcd(problem.capacity, cap) * cap) << 30n;
  for (const name of TERMS) cost[name] = layers * exact[name][0] * (common / exact[name][1]) * fine;
  return { cost, cap, scale: 1000n * common * fine, decode: cost.base + cost.decode_base, refill: cost.base + cost.prefill_base };
}

/* What one request takes at the least: own work and share of its prefill, and lines a + b j for its later tokens. */
function requestOf(problem, rates, i) {
  const { cost, cap, decode, refill } = rates, s = problem.prompt[i], m = problem.output[i] - 1n, M = problem.capacity;
  const chunks = problem.chunked ? up(s, cap) : 1n, token = cost.token + cost.prefill_token;
  const before = (chunks - 1n) * s - cap * (chunks * (chunks - 1n) / 2n); // tokens cached before chunks, in all
  let squares = cost.prefill_square * s * s;
  const part = (cost.prefill_square - cost.prefill_cross / 2n) * s * s;
  if (problem.chunked && part > 0n) { // K chunks or more: part / K + request (K - chunks), least beside a root
    const each = cost.prefill_request, ends = most(s, chunks), near = each > 0n ? root2(part / each) : s;
    const at = (k) => part / k + each * (k - chunks), clamp = (k) => least(most(k, chunks), ends);
    squares = cost.prefill_cross / 2n * s * s + least(at(clamp(near)), at(clamp(near + 1n)));
  }
  const own = token * s + squares + cost.prefill_kv * before + cost.prefill_request * chunks;
  const share = cost.base / M * (before + s + problem.offset * chunks) + cost.prefill_base / cap * s;
  const step = [cost.token + cost.decode_request + cost.decode_kv * s, cost.decode_kv];
  const again = [token * (s + 1n) + cost.prefill_request, token], kv = s + 1n + problem.offset;
  const plus = (line, at, rise) => [line[0] + at, line[1] + rise];
  const lesser = (x, y) => { // the sum over j < m of the smaller of two lines
    let total = 0n;
    for (let j = 0n; j < m; j++) total += least(x[0] + x[1] * j, y[0] + y[1] * j);
    return total;
  };
  const decoded = plus(step, decode / M * kv, decode / M), recomputed = plus(again, cost.base / M * kv, cost.base / M);
  const first = own + chunks * refill;
  return { s, m, own, share, first, step, again, decoded, recomputed, total: own + share + lesser(decoded, recomputed),
    chain: first + lesser(plus(step, decode, 0n), plus(again, refill, 0n)) };
}

function workLeaf(part, leaf, objective) {
  fields(leaf, ["relaxation"], "work");
  const prefills = objective === "mean_ttft";
  const length = part.requests.map((r) => part.ticks(prefills ? r.own + r.share : r.total));
  const alone = part.requests.map((r) => part.ticks(prefills ? r.first : r.chain));
  const ends = part.arrival.map((a, i) => a + alone[i]).sort(ascending);
  if (objective === "makespan") {
    let rest = 0n, busy = 0n;
    for (let i = length.length - 1; i >= 0; i--) busy = most(busy, part.arrival[i] + (rest += length[i]));
    return most(busy, ends[ends.length - 1]);
  }
  const machine = srpt(part.arrival.map((a, i) => [a, length[i]]));
  return most(sum(machine.map((end, k) => most(end, ends[k]))) - sum(part.arrival) - BigInt(ends.length), sum(alone));
}

/* Prices p1, p2 of machine time: what every token pays at its best moment, less the integral of the prices. */
function busyTime(part, leaf, objective) {
  fields(leaf, ["relaxation", "width", "denominator", "p1", "p2"], "busy-time");
  need(objective === "tel", "busy-time: this checker covers tel alone");
  const width = whole(leaf.width, "width"), unit = whole(leaf.denominator, "denominator"), { rates, scale, perSecond } = part;
  const p1 = wholes(leaf.p1, "p1"), p2 = wholes(leaf.p2, "p2", p1.length), one = 1n << 30n, cells = p1.length;
  need(width >= 1n && unit >= 1n && cells, "busy-time: found a number out of range");
  need([...p1, ...p2].every((p) => p >= 0n && p < 1n << 40n), "busy-time: found a price out of range");
  const q1 = Float64Array.from(p1, Number), q2 = Float64Array.from(p2, Number), FINE = 40n, toTicks = perSecond << FINE;

  /* The least cost, in 2**-40 ticks, of a token at any moment from `since` on. Weights are theta and Theta, in fractions;
  it has own work w and pays w + sigma, and its batch lasts f + x with x >= low. */
  const cheapest = (since, theta, Theta, paid, w, f, low) => {
    const cell = since / width, turn = w * f > 0n ? [Theta[0] * low * low * unit, Theta[1] * w * f] : null;
    const cost = (c) => { // exact, rounded down
      const start = most(since, BigInt(c) * width) - since, [a, b] = c < cells ? [p1[c], p2[c]] : [0n, 0n];
      let value = (start * theta[0] << FINE) / theta[1] + (a * paid + b * w) * toTicks / (unit * scale);
      if (turn === null || b * turn[1] <= turn[0]) value += Theta[0] * low * toTicks / (Theta[1] * scale) + (low > 0n ? b * w * f * toTicks / (low * unit * scale) : 0n);
      else value += root2(4n * b * w * f * Theta[0] * toTicks * toTicks / (unit * scale * scale * Theta[1]));
      return value;
    };
    if (cell >= BigInt(cells)) return cost(cells);
    const tick = Number(perSecond) / Number(scale), rise = Number(theta[0]) / Number(theta[1]) * Number(width);
    const u = Number(unit), T = Number(Theta[0]) / Number(Theta[1]), work = Number(w) * tick, fixed = Number(f) * tick, x = Number(low) * tick;
    const first = Number(cell), gone = Number(since - cell * width) / Number(width), a = Number(paid) * tick / u, near = [];
    let best = Infinity;
    for (let c = first; c <= cells; c++) {
      const wait = c === first ? 0 : rise * (c - first - gone), b = c < cells ? q2[c] / u : 0;
      if (wait > best) break;
      const free = T > 0 ? Math.sqrt(b * work * fixed / T) : Infinity;
      const y = Math.max(x, free), value = wait + (c < cells ? q1[c] * a : 0) + b * work + (y > 0 ? T * y + b * work * fixed / y : 0);
      if (value <= best * (1 + 1e-10)) near.push([value, c]);
      best = Math.min(best, value);
    }
    need(Number.isFinite(best), "busy-time: found numbers that are too large to check");
    let found = null; // floating point may be wrong by less than that share
    for (const [value, c] of near) if (value <= best * (1 + 1e-10)) found = found === null ? cost(c) : least(found, cost(c));
    return found;
  };

  let total = 0n; // in 2**-40 ticks
  part.requests.forEach((r, i) => {
    const { cost, refill } = rates, decode = least(rates.decode, refill), { m, s, own } = r, since = part.arrival[i], M = part.capacity;
    const inChunks = (cost.base / M + cost.prefill_base / rates.cap) * s;
    const steep = (cost.prefill_square > cost.prefill_cross ? cost.prefill_square : cost.prefill_cross) + cost.prefill_kv;
    const largest = (cost.token + cost.prefill_token + steep * s + cost.prefill_request) * s;
    const paid = own + (!part.chunked ? inChunks : largest > 0n ? own * inChunks / largest : 0n);
    const line = (x, y) => [least(x[0], y[0]), least(x[1], y[1])], at = (l, k) => l[0] + k * l[1];
    const work = line(r.step, r.again), pays = line(r.decoded, r.recomputed), upto = (l, k) => k * l[0] + l[1] * (k * (k - 1n) / 2n);
    const whole_ = paid + upto(pays, m), theta = m > 0n && whole_ > 0n ? (paid << 30n) / whole_ : one;
    total += (theta * refill * toTicks) / (2n * one * scale);
    if (theta > 0n) {
      let pieces = 0n;
      for (let q = 0n; q < 16n; q++) {
        const ahead = part.ticks((own + refill) * q >> 4n);
        pieces += (theta * ahead << FINE) / one + cheapest(since + ahead, [theta, one], [theta, 2n * one], paid, own, refill, own);
      }
      total += pieces >> 4n;
    }
    if (m === 0n) return;
    const alone = [least(r.step[0] + rates.decode, r.again[0] + refill), work[1]];
    if (theta === one) { total += part.ticks(upto(alone, m)) << FINE; return; }
    total += (one + theta) * m * decode * toTicks / (2n * one * scale);
    for (let b = 0n; b < 8n; b++) { // chords: the cost is concave in the number of the step
      const low = m * b / 8n, high = m * (b + 1n) / 8n;
      if (low === high) continue;
      const behind = part.ticks(r.first + upto(alone, low));
      total += ((one - theta) * (high - low) * behind << FINE) / (m * one);
      const end = (k) => cheapest(since + behind, [one - theta, m * one], [2n * m * theta + (one - theta) * (2n * k + 1n), 2n * m * one],
        at(pays, k), at(work, k), decode, at(work, low));
      total += high - low === 1n ? end(low) : (high - low) * (end(low) + end(high - 1n)) / 2n;
    }
  });
  return (total >> FINE) - BigInt(part.requests.length) - up((sum(p1) + sum(p2)) * width, unit);
}

function ticksSince(problem, ticks) { // arrivals as floats are exact binary fractions
  const binary = (x) => {
    if (typeof x === "bigint") return [x, 0];
    let power = 0;
    while (!Number.isInteger(x)) { x *= 2; power++; }
    return [BigInt(x), power];
  };
  const exact = problem.arrival.map(binary), power = BigInt(exact.reduce((x, [, p]) => Math.max(x, p), 0));
  const at = exact.map(([x, p]) => x << (power - BigInt(p))), first = at.reduce(least);
  return { since: at.map((x) => ((x - first) * ticks) >> power), begin: (first * ticks) >> power };
}

function seconds(problem, certificate) {
  const { objective, cost_model: model, tree } = certificate, ticks = whole(certificate.ticks_per_second, "ticks_per_second");
  need(["tel", "mean_ttft", "makespan"].includes(objective), `objective: this checker does not cover ${objective}`);
  need(ticks >= 1n && ticks <= 10n ** 18n, "ticks_per_second: expected 1 to 10**18");
  const rates = ratesOf(problem, model), { since, begin } = ticksSince(problem, ticks), node = objective === "makespan" ? "max" : "sum";
  const order = [...since.keys()].sort((i, j) => (problem.arrival[i] < problem.arrival[j] ? -1 : problem.arrival[i] > problem.arrival[j] ? 1 : i - j));
  need(tree && typeof tree === "object", "tree: expected a JSON object");
  let parts = [{ first: 0n, last: BigInt(problem.n - 1), tree }], free = 0n;
  if (!("relaxation" in tree)) {
    fields(tree, [node], "tree");
    need(Array.isArray(tree[node]) && tree[node].length, "tree: expected parts");
    parts = tree[node];
  }
  const values = parts.map((one) => {
    fields(one, ["first", "last", "tree"], "tree");
    need(whole(one.first, "first") >= free && whole(one.last, "last") >= one.first && one.last < BigInt(problem.n), "tree: found ranges that overlap");
    free = one.last + 1n;
    const members = order.slice(Number(one.first), Number(free)), at = since[members[0]], kind = one.tree && one.tree.relaxation;
    const leaves = { work: workLeaf, "busy-time": busyTime };
    need(Object.keys(leaves).includes(kind), `tree: this checker does not cover ${kind}`);
    const part = { arrival: members.map((i) => since[i] - at), requests: members.map((i) => requestOf(problem, rates, i)), rates, scale: rates.scale,
      perSecond: ticks, capacity: problem.capacity, chunked: problem.chunked, ticks: (time) => time * ticks / rates.scale };
    return (node === "max" ? at : 0n) + leaves[kind](part, one.tree, objective);
  });
  return node === "max" ? begin + values.reduce(most) : sum(values);
}

/* ---- a certificate ---- */

/* What a certificate proves, whatever it claims: rounds, or ticks. */
function proved(problem, certificate) {
  const inSeconds = certificate.model === "seconds", names = ["format", "version", "instance_sha256", "model", "objective", "claim", "value", "tree", "sha256"];
  need(inSeconds || certificate.model === "rounds", "model: expected rounds or seconds");
  need(!("pools" in certificate), "pools: this checker does not cover several machines");
  names.push(...(inSeconds ? ["cost_model", "ticks_per_second"] : ["denominator"]), ...(!inSeconds && certificate.claim === "optimal" ? ["schedule"] : []));
  fields(certificate, names, "certificate");
  need(certificate.format === "optsched-certificate" && certificate.version === 1n, "format: expected optsched-certificate, version 1");
  need(certificate.instance_sha256 === problem.digest, "instance_sha256: found another instance's");
  const { sha256: seal, ...rest } = certificate;
  need(seal === sha256(canonical(rest)), "sha256: found a certificate that was changed");
  need(certificate.claim === "bound" || (certificate.claim === "optimal" && !inSeconds), "claim: expected bound, or in rounds optimal");
  need(problem.rounds !== inSeconds, "model: found another unit of time than the instance's");
  if (inSeconds) return seconds(problem, certificate);
  const unit = whole(certificate.denominator, "denominator"), leaf = certificate.tree, leaves = { prices, pairs, lengths, ramp };
  need(unit >= 1n, "denominator: expected an integer >= 1");
  need(certificate.objective === "tel", `objective: this checker does not cover ${certificate.objective}`);
  need(leaf && Object.keys(leaves).includes(leaf.relaxation), `tree: this checker does not cover ${leaf && leaf.relaxation}`);
  return leaves[leaf.relaxation](problem, leaf, unit);
}

/* Refuses a certificate, or says what it proves. Both are the texts of files. In seconds the first checker rounds down more
often, so a value may be less than what is proved here. */
function check(instance, certificate) {
  try {
    const problem = readInstance(parse(instance)), claim = parse(certificate), found = proved(problem, claim), value = whole(claim.value, "value");
    need(problem.rounds ? value === found : value <= found, `value: found ${value}; expected ${found}, which is proved`);
    if (claim.claim === "optimal") {
      const reached = scheduled(problem, claim.schedule, problem.digest);
      need(reached === value, `schedule: found a total latency of ${reached}; expected ${value}`);
    }
    return { proved: found, value, claim: claim.claim, objective: claim.objective, ticks: claim.ticks_per_second };
  } catch (error) {
    if (error instanceof Refused || !(error instanceof TypeError || error instanceof RangeError || error instanceof SyntaxError)) throw error;
    throw new Refused(`found what cannot be checked (${error.message})`);
  }
}

root.check = check;
root.Refused = Refused;

/* ---- the page, and the command ---- */

function words({ value, claim, objective, ticks }) {
  const what = claim === "optimal" ? "the optimum is" : "no schedule has less than";
  return `accepted: ${what} ${value} ${ticks === undefined ? "rounds" : `ticks of 1 / ${ticks} s`} (${objective})`;
}

async function textOf(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes[0] !== 31 || bytes[1] !== 139) return new TextDecoder().decode(bytes);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function judged(one, other) {
  try {
    return words(/"optsched-instance"/.test(one.slice(0, 1000)) ? check(one, other) : check(other, one));
  } catch (error) {
    if (error instanceof Refused) return `refused: ${error.message}`;
    throw error;
  }
}

if (root.document) {
  const place = root.document.getElementById("check"), said = place.querySelector("output"), files = [];
  const take = async (given) => {
    for (const file of given) files.push(file);
    said.value = files.length < 2 ? `${files[0].name}: and the other file?` : "checking ...";
    if (files.length < 2) return;
    const [one, other] = await Promise.all(files.splice(0).map(textOf));
    setTimeout(() => { said.value = judged(one, other); });
  };
  place.addEventListener("dragover", (event) => event.preventDefault());
  place.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files); });
  place.querySelector("input").addEventListener("change", (event) => take(event.target.files));
} else if (require.main === module) {
  const { readFileSync } = require("fs"), { gunzipSync } = require("zlib");
  const read = (name) => { const bytes = readFileSync(name); return (bytes[0] === 31 && bytes[1] === 139 ? gunzipSync(bytes) : bytes).toString(); };
  const said = judged(...process.argv.slice(2, 4).map(read));
  console.log(said);
  process.exitCode = said.startsWith("accepted") ? 0 : 5;
}
})(typeof module === "object" ? module.exports : window);
