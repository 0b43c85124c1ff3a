// Figures as `lowcomm-node status` prints them (system/units.py).

export const MISSING = "–";

export function size(count) {
  if (count === null || count === undefined) return MISSING;
  let value = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(value) < 1000) {
      return `${value.toFixed(unit === "B" || unit === "kB" ? 0 : 1)} ${unit}`;
    }
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

// Bytes a second, in bits as limits are written.
export function rate(value) {
  if (value === null || value === undefined) return MISSING;
  let bits = 8 * value;
  for (const unit of ["bit", "kbit", "Mbit", "Gbit"]) {
    if (bits < 1000) return `${Number(bits.toPrecision(4))}${unit}/s`;
    bits /= 1000;
  }
  return `${Number(bits.toPrecision(4))}Tbit/s`;
}

export function quantity(count) {
  if (count === null || count === undefined) return MISSING;
  if (Math.abs(count) < 1e3) return count.toFixed(0);
  if (Math.abs(count) < 1e6) return `${(count / 1e3).toFixed(1)}k`;
  if (Math.abs(count) < 1e9) return `${(count / 1e6).toFixed(1)}M`;
  return `${(count / 1e9).toFixed(1)}G`;
}

export function loss(value) {
  return value === null || value === undefined ? MISSING : value.toFixed(4);
}

export function milliseconds(value) {
  if (value === null || value === undefined) return MISSING;
  return value < 0.01 ? `${(1000 * value).toFixed(1)} ms` : `${(1000 * value).toFixed(0)} ms`;
}

export function seconds(value) {
  if (value === null || value === undefined) return MISSING;
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole = Math.floor(value);
  const two = (number) => String(number).padStart(2, "0");
  const minutes = Math.floor(whole / 60) % 60;
  const hours = Math.floor(whole / 3600);
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

// A time span in words: `40 s`, `12 min`, `3 h 20 min`, `4 d 3 h`.
export function span(value) {
  if (value === null || value === undefined) return MISSING;
  if (value < 60) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${hours / 24} d`;
}

// The time of day of Unix seconds.
export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
}

export function shortPeer(peer) {
  return clean(peer).slice(-6);
}

export function small(value) {
  return value === null || value === undefined ? MISSING : value.toPrecision(3);
}

export function share(value) {
  return value === null || value === undefined ? MISSING : `${(100 * value).toFixed(1)} %`;
}

export function count(value) {
  return value === null || value === undefined ? MISSING : String(value);
}

// Peers choose these texts: control and bidirectional characters could disguise them.
export function clean(text) {
  if (text === null || text === undefined) return MISSING;
  return String(text)
    .slice(0, 500)
    .replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, " ");
}

// What a device that trains does.
export function accelerator(one) {
  if (one === null || one === undefined) return MISSING;
  const memory = one.memory_total && `${size(one.memory_taken)} of ${size(one.memory_total)}`;
  const slow = (one.speed ?? 1) < 0.8 && `${one.speed.toFixed(1)} times as fast as the fastest`;
  const heat = one.temperature !== null && `${one.temperature} °C`;
  return [share(one.load), memory, heat, slow, clean(one.name)].filter(Boolean).join(", ");
}

export const FORMATS = {
  accelerator,
  size,
  rate,
  quantity,
  loss,
  milliseconds,
  seconds,
  span,
  small,
  share,
  count,
  clean,
};
