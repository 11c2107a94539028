// Texts of the user in the address of a page, compressed. Browsers send no server this part of an address.

// Chats and mail programs cut longer links.
export const MOST_CHARACTERS = 8_000;
// A link may be made to grow on the machine that opens it.
const MOST_BYTES = 1_000_000;
const LEFT_OUT = "left-out";

// The compressed text; one that says so where that is longer than the room that other texts of the link leave.
export async function packed(text, room = MOST_CHARACTERS) {
  const plain = new Blob([text]);
  if (plain.size > MOST_BYTES) return LEFT_OUT;
  const stream = plain.stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  const code = btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return code.length > room ? LEFT_OUT : code;
}

// What a copied link lacks, in words.
export function lackText(code, what) {
  return code === LEFT_OUT
    ? ` It is without ${what}, which would make it longer than ${MOST_CHARACTERS} characters: send the file, too.` : "";
}

// The text of a link; an error says in words why there is none.
export async function unpacked(code, what) {
  if (code === LEFT_OUT) throw new Error(`this link is without its ${what}, which was too long for it`);
  if (code.length > MOST_CHARACTERS) throw new Error(`the ${what} of this link is longer than ${MOST_CHARACTERS} characters`);
  try {
    return await inflated(code);
  } catch (error) {
    throw new Error(`the ${what} of this link is ${error instanceof RangeError ? "larger than 1 MB" : "damaged"}`);
  }
}

async function inflated(code) {
  const letters = atob(code.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const parts = [];
  let size = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    size += part.value.length;
    if (size > MOST_BYTES) {
      reader.cancel();
      throw new RangeError();
    }
    parts.push(part.value);
  }
  return new TextDecoder("utf-8", { fatal: true }).decode(await new Blob(parts).arrayBuffer());
}

// Write the address of a view to that of the page, and copy it; return what to say.
export async function copyLink(address, lacks) {
  history.replaceState(null, "", address);
  try {
    await navigator.clipboard.writeText(location.href);
    return `The link is copied.${lacks}`;
  } catch {
    return `The browser does not copy; the link is in its address.${lacks}`;
  }
}
