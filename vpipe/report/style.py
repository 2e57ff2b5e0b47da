"""Style a report: colours that differ for colour-blind eyes, on a light and on a dark page; its few scripts."""

from __future__ import annotations

from vpipe.report.idle_causes import Cause
from vpipe.schedules.kinds import Kind, kinds
from vpipe.visualize.svg import mixed

FILLS = {Cause.SCHEDULE: "var(--idle)", Cause.TRANSFER: "url(#transfer)", Cause.STRAGGLER: "url(#straggler)",
         Cause.DISPATCH: "url(#dispatch)", Cause.UNKNOWN: "url(#unknown)"}

_CSS = """
:root{color-scheme:light dark;--bg:#fff;--panel:#f6f8fa;--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--idle:#e6eaef;
--comm:#8c959f;--hatch:#57606a;--late:#cf222e;--train:#0a58ca;--eval:#bc4c00;--speed:#1a7f5a;--plan:#8250df;
--warn:#fff8e1;--warnline:#d4a72c}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--panel:#151b23;--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;
--idle:#262e38;--comm:#767f89;--hatch:#9aa4af;--late:#ff7b72;--train:#6ea8fe;--eval:#f4b860;--speed:#63c48d;
--plan:#b79cf0;--warn:#2b2410;--warnline:#9e7b1c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1200px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:26px;line-height:1.2;margin:0 0 6px;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:18px;margin:40px 0 4px;letter-spacing:-.005em}
h3{font-size:13px;margin:0 0 6px;font-weight:600}
p{margin:0 0 12px;max-width:78ch}.soft{color:var(--soft)}.lead{font-size:14px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(max(148px,22%),1fr));gap:12px;margin:20px 0 0;
padding:0}
.card{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:12px 14px;min-width:0}
.card dt{font-size:12px;color:var(--soft)}.card dd{margin:0}
.card .big{font-size:23px;font-weight:650;line-height:1.3;letter-spacing:-.01em;overflow-wrap:anywhere}
.card .big small{font-size:13px;font-weight:400;color:var(--soft);letter-spacing:0}
.card .sub{font-size:12.5px;color:var(--soft);line-height:1.4}
.notes{background:var(--warn);border:1px solid var(--warnline);border-radius:10px;
padding:10px 14px 10px 32px;margin:16px 0 0}
.notes li{margin:2px 0;overflow-wrap:anywhere}
figure{margin:12px 0 0}
.bar{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;font-size:12.5px;margin:0 0 10px;padding:0;
list-style:none}
.bar li{display:flex;align-items:center;gap:6px}.bar svg{flex:none}
.zoom{margin-left:auto;display:flex;gap:4px}
.zoom button{font:inherit;font-size:12.5px;color:var(--ink);background:var(--panel);border:1px solid var(--line);
border-radius:6px;padding:2px 10px;cursor:pointer}
.zoom button[aria-pressed=true]{background:var(--ink);color:var(--bg);border-color:var(--ink)}
.lanes{display:flex;border:1px solid var(--line);border-radius:10px;overflow:hidden;background:var(--bg)}
.names{flex:none;background:var(--panel);border-right:1px solid var(--line);font-size:12px}
.names div{display:flex;align-items:center;padding:0 10px;white-space:nowrap}
.names .group{font-weight:650;font-size:13px}
.scroll{flex:1;overflow-x:auto;min-width:0}
.scroll svg{display:block;min-width:680px}
.lanes svg text,.plot text{font-size:11px;fill:#0b1320;text-anchor:middle}
.lanes svg text.ax{fill:var(--soft);text-anchor:start}
.lw,.l2,.l4,.l8{display:none}
@media(min-width:1240px){.lw{display:inline}}
[data-zoom="2"] .lw,[data-zoom="4"] .lw,[data-zoom="8"] .lw,
[data-zoom="2"] .l2,[data-zoom="4"] .l2,[data-zoom="4"] .l4,[data-zoom="8"] .l2,[data-zoom="8"] .l4,
[data-zoom="8"] .l8{display:inline}
[data-zoom="2"] .scroll svg{width:200%;min-width:1360px}[data-zoom="4"] .scroll svg{width:400%;min-width:2720px}
[data-zoom="8"] .scroll svg{width:800%;min-width:5440px}
.cell{stroke:var(--bg);stroke-width:.7}.STEP0{stroke:#d6336c;stroke-width:1.4}
.comm{fill:var(--comm)}.grid{stroke:var(--line);stroke-width:1}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.on{stroke:var(--ink);stroke-width:2}
output{display:block;min-height:22px;margin-top:6px;font-size:13px;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:24px 32px}
.small{grid-template-columns:repeat(auto-fill,minmax(min(100%,260px),1fr));gap:18px 24px}
.plot{display:grid;grid-template-columns:auto 1fr;grid-template-rows:var(--h,200px) 20px;column-gap:8px;
font-size:11.5px;color:var(--soft)}
.plot .y{position:relative;text-align:right;white-space:nowrap}
.plot .y i{visibility:hidden;font-style:normal;display:block;height:0;overflow:hidden}
.plot .y span{position:absolute;right:0;transform:translateY(-50%)}
.plot .x{position:relative;grid-column:2;height:20px}
.plot .x span{position:absolute;transform:translateX(-50%);top:3px;white-space:nowrap}
.plot .x span:first-child{transform:none}.plot .x span:last-child{transform:translateX(-100%)}
.plot svg{width:100%;height:100%;display:block;overflow:visible}
.plot path,.plot line{vector-effect:non-scaling-stroke;fill:none}
.key{display:inline-block;width:16px;height:0;border-top:3px solid;border-radius:2px}
.key.thin{border-top-width:1.5px;opacity:.55}.key.dash{border-top-style:dashed;border-top-width:2px}
.key.dot{width:8px;height:8px;border:0;border-radius:50%}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:10px;margin-top:12px}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:7px 10px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
thead th{border-top:0;font-size:12px;font-weight:600;color:var(--soft);background:var(--panel);vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tbody th{font-weight:600}
td small{display:block;color:var(--soft);font-size:12px}
tr.slow td.hot{font-weight:650}
.bars{width:100%;border-collapse:separate;border-spacing:0 4px}.bars th,.bars td{border:0;padding:0}
.bars th{font-weight:400;font-size:12px;padding-right:10px;width:1px}.bars td{width:100%}.bars svg{display:block}
.bars tr:nth-child(even) td,.bars tr:nth-child(even) th{padding-bottom:8px}
details{margin-top:12px}summary{cursor:pointer;color:var(--soft);font-size:13.5px}
dl.facts{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;font-size:13.5px;margin:10px 0 0}
dl.facts dt{color:var(--soft)}dl.facts dd{margin:0;overflow-wrap:anywhere;min-width:0}
@media(max-width:600px){main{padding:18px 14px 36px}h1{font-size:21px}.cards{grid-template-columns:1fr 1fr;gap:8px}
.card{padding:10px 11px}.card .big{font-size:19px}.names div{padding:0 7px}th,td{padding:6px 9px}}
@media print{.zoom,output{display:none}.card,.lanes,.wide{break-inside:avoid}}
"""

SCRIPT = """
for(const f of document.querySelectorAll('.timeline')){
const z=f.querySelector('.zoom'),o=f.querySelector('output'),s=f.querySelector('.scroll');let on;
z.hidden=false;
z.addEventListener('click',e=>{const b=e.target.closest('button');if(!b)return;
const m=(s.scrollLeft+s.clientWidth/2)/s.scrollWidth;f.dataset.zoom=b.value;
for(const c of z.children)c.setAttribute('aria-pressed',c===b);s.scrollLeft=m*s.scrollWidth-s.clientWidth/2});
const show=e=>{const c=e.target.closest('rect');if(!c||!c.firstChild)return;if(on)on.classList.remove('on');
on=c;c.classList.add('on');o.textContent=c.firstChild.textContent};
s.addEventListener('pointerover',show);s.addEventListener('click',show)}
"""


def css(used: set[Kind], chunks: int) -> str:
    """Return the style sheet, with a class per operation and stage of a rank; later stages are paler."""
    fills = "".join(f".{op}{chunk}{{fill:{shade(op, chunk, chunks)}}}" for op in kinds() if op.works and op in used
                    for chunk in range(chunks if op.per_microbatch else 1))
    return _CSS + fills


def shade(op: Kind, chunk: int, chunks: int) -> str:
    """Return the colour of an operation on the rank's stage number ``chunk`` of ``chunks``."""
    return mixed(op.colour, 0.6 * chunk / max(1, chunks - 1))


PATTERNS = """<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="transfer" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="var(--idle)"/><rect width="2" height="6" fill="var(--hatch)" opacity=".75"/></pattern>
<pattern id="straggler" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<rect width="6" height="6" fill="var(--idle)"/><rect width="3" height="6" fill="var(--late)"/></pattern>
<pattern id="dispatch" width="5" height="5" patternUnits="userSpaceOnUse">
<rect width="5" height="5" fill="var(--idle)"/>
<circle cx="2.5" cy="2.5" r="1.1" fill="var(--hatch)" opacity=".6"/></pattern>
<pattern id="unknown" width="8" height="8" patternUnits="userSpaceOnUse">
<rect width="8" height="8" fill="var(--idle)"/><path d="M0 0L8 8M8 0L0 8" stroke="var(--hatch)"/></pattern>
</defs></svg>"""
