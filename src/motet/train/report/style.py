"""The style sheet of a report, for light and dark screens. It loads nothing."""

CSS = """
:root { --ink: #1c1e21; --soft: #6a7078; --line: #dfe3e8; --page: #ffffff; --card: #f6f7f9; --c0: #98a1ac; --c1:
  #1f6fd0; --c2: #d9822b; --c3: #2c9a67; --good: #1f7a4d; --bad: #b3382c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa2ad; --line: #343a42; --page: #16181c;
  --card: #1f2328; --c0: #77808c; --c1: #5b9cf0; --c2: #e59a4c; --c3: #4dba86; --good: #5cc795; --bad: #ef7a6d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 32px 20px 64px; background: var(--page); color: var(--ink); font:
  15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 40px 0 8px; }
h3 { font-size: 14px; margin: 12px 0 4px; }
p { margin: 4px 0 12px; color: var(--soft); max-width: 75ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0; }
.tile { background: var(--card); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 8px 32px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 13px; }
svg text.name { fill: var(--ink); }
.grid { stroke: var(--line); }
.rule { stroke: var(--ink); stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.faint { stroke-width: 1; opacity: .5; }
.line.s0 { stroke: var(--c0); }
.line.s1 { stroke: var(--c1); }
.line.s2 { stroke: var(--c2); }
.line.s3 { stroke: var(--c3); }
.bar.s0 { fill: var(--c0); }
.bar.s1 { fill: var(--c1); }
.bar.s2 { fill: var(--c2); }
.bar.s3 { fill: var(--c3); }
.legend { color: var(--soft); font-size: 13px; margin-top: 2px; }
.legend span { margin-right: 18px; }
.key { display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin-right: 6px; vertical-align:
  middle; }
.key.s0 { background: var(--c0); }
.key.s1 { background: var(--c1); }
.key.s2 { background: var(--c2); }
.key.s3 { background: var(--c3); }
iframe { width: 100%; border: 1px solid var(--line); border-radius: 6px; background: #ffffff; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 8px 0; }
th, td { text-align: right; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 14px; }
.card { background: var(--card); border-radius: 8px; padding: 14px; overflow-wrap: anywhere; border-left: 4px solid
  var(--bad); }
.card.right { border-left-color: var(--good); }
.card.shown { border-left-color: var(--line); }
.card .task { color: var(--soft); font-size: 13px; }
.card img { max-width: 100%; max-height: 160px; display: block; margin: 8px 0; background: #fff; image-rendering:
  pixelated; min-height: 40px; }
.card .made { display: flex; gap: 18px; color: var(--soft); font-size: 13px; }
.card video { max-width: 100%; max-height: 160px; display: block; margin: 8px 0; }
.card .made img { min-height: 96px; }
.card audio { width: 100%; margin: 6px 0; height: 36px; }
.card dl { margin: 6px 0 0; display: grid; grid-template-columns: auto 1fr; gap: 2px 10px; }
.card dt { color: var(--soft); }
.card dd { margin: 0; }
.card .wrong { color: var(--bad); }
.card .good { color: var(--good); }
"""
