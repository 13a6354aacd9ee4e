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

for (const [entry, name] of [["src/main.jsx", "studio.js"], ["src/studio.css", "studio.css"]]) {
  const result = await build({
    entryPoints: [here(entry).pathname],
    absWorkingDir: here(".").pathname,
    bundle: true,
    minify: true,
    write: false,
    format: "esm",
    target: ["es2022"],
    jsx: "automatic",
    jsxImportSource: "preact",
    legalComments: "none",
    charset: "utf8",
  });
  const licences = name.endsWith(".js") ? ["preact", "@preact/signals"].map((part) => `\n${part}:\n${readFileSync(here(`node_modules/${part}/LICENSE`), "utf8")}`) : [];
  const head = `/* attnflow studio. Sources: sha256 ${digest}\n${licences.join("")}*/\n`;
  writeFileSync(`${target}/${name}`, head + result.outputFiles[0].text);
  console.log(`${name} ${result.outputFiles[0].contents.length} bytes`);
}
