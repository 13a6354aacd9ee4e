// Bundles the page into the package. The first line of the bundle names its sources by their hash, which a test compares.

import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const here = (path) => new URL(path, import.meta.url);
const target = process.argv[2] ?? here("../src/attnflow/report/assets/").pathname;
const sources = ["build.mjs", "package.json", "package-lock.json", ...readdirSync(here("src")).sort().map((name) => `src/${name}`)];
const hash = createHash("sha256");
for (const name of sources) hash.update(`${name}\0`).update(readFileSync(here(name))).update("\0");
const digest = hash.digest("hex");

const bundle = async (entry, options) => {
  const result = await build({ entryPoints: [here(entry).pathname], absWorkingDir: here(".").pathname, bundle: true, minify: true, write: false, target: ["es2022"], charset: "utf8", ...options });
  return result.outputFiles[0].text.trimEnd();
};

// The style travels within the module, which puts it where it is mounted: a page, or a shadow root in somebody else's.
const style = await bundle("src/studio.css", {});
const text = await bundle("src/main.jsx", {
  format: "esm",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  plugins: [{ name: "style", setup: (part) => part.onLoad({ filter: /\.css$/ }, () => ({ contents: style, loader: "text" })) }],
});
if (/<\/script|<!--/i.test(text)) throw new Error("the module cannot stand in a page: it holds an end of a script");
const licences = ["preact", "@preact/signals"].map((part) => `\n${part}:\n${readFileSync(here(`node_modules/${part}/LICENSE`), "utf8")}`);
const content = `/* attnflow studio. Sources: sha256 ${digest}\n${licences.join("")}*/\n${text}\n`;
writeFileSync(`${target}/studio.js`, content);
console.log(`studio.js ${Buffer.byteLength(content)} bytes`);
