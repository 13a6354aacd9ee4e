// Settings of MathJax 3.2.2 (Apache-2.0), which lies beside this file: the site loads nothing from elsewhere.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*", processHtmlClass: "arithmatex", enableMenu: false },
  svg: { fontCache: "none" },
};
