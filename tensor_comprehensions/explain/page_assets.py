"""The style sheet and the script of a page. Its content security policy has their hashes, so nothing else runs."""

STYLE = """
:root{--bg:#fff;--fg:#1a1a1a;--dim:#666;--rule:#ccc;--mark:#fff3b0;--pin:#ffe27a;--pane:#fafafa;
--c0:#1f4fa3;--c1:#d97706;--c2:#0f7b53;--c3:#c02f6b;--c4:#5b35a8;--c5:#0e8fb3;--c6:#7a5a12;--c7:#d03a2b}
@media (prefers-color-scheme:dark){:root{--bg:#16181c;--fg:#e4e4e4;--dim:#9a9a9a;--rule:#3a3d44;--mark:#4a4320;
--pin:#6b5f1f;--pane:#1d2026;--c0:#7aa7ff;--c1:#ffb454;--c2:#5fd3a2;--c3:#ff86b5;--c4:#b69cff;--c5:#62d4f2;--c6:#d9b66a;
--c7:#ff8a7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:14px/1.4 system-ui,sans-serif}
header{padding:10px 16px 0}h1{font-size:20px;margin:0}header p{margin:2px 0 8px;color:var(--dim)}
main{padding:0 16px 24px}h2{font-size:13px;margin:0;padding:6px 8px;color:var(--dim);font-weight:600}
small{font-weight:400}
.panes{display:grid;grid-template-columns:1fr 1fr;gap:10px}
.pane{border:1px solid var(--rule);background:var(--pane);border-radius:4px;min-width:0;display:flex;
flex-direction:column;max-height:340px}
.pane:last-child:nth-child(odd){grid-column:1/-1}
.pane:focus{outline:2px solid var(--c0)}
.pane pre{margin:0;padding:0 0 6px;overflow:auto;flex:1;font:12px/1.45 ui-monospace,monospace}
pre .l{display:block;padding:0 8px;border-left:4px solid transparent;white-space:pre;width:max-content;min-width:100%}
.c0{border-left-color:var(--c0)!important}.c1{border-left-color:var(--c1)!important}
.c2{border-left-color:var(--c2)!important}.c3{border-left-color:var(--c3)!important}
.c4{border-left-color:var(--c4)!important}.c5{border-left-color:var(--c5)!important}
.c6{border-left-color:var(--c6)!important}.c7{border-left-color:var(--c7)!important}
.cm{border-left:4px double var(--dim)!important}
.near{background:var(--mark)}.pin{background:var(--pin)}
#def pre,#loops pre{counter-reset:line}
#def .l::before,#loops .l::before{counter-increment:line;content:counter(line);
display:inline-block;width:3.2em;padding-right:.8em;text-align:right;color:var(--dim)}
section{margin-top:14px}.panes section{margin-top:0}
table{border-collapse:collapse;width:100%;font-size:12.5px}td,th{text-align:left;vertical-align:top;padding:3px 8px;
border-top:1px solid var(--rule);overflow-wrap:anywhere}thead th{color:var(--dim);border:0}
#facts th,#calls th{width:12em;color:var(--dim);font-weight:400}
#why td:nth-child(1){white-space:nowrap;color:var(--dim)}#why td:nth-child(5){white-space:nowrap}
#why td:nth-child(2){min-width:9em}#why th{overflow-wrap:normal}
small{color:var(--dim)}
section>p{margin:4px 8px}section>svg{margin:4px 8px}svg{display:block;max-width:100%}
svg text{font:11px ui-monospace,monospace;fill:var(--fg)}
.bar{display:inline-block;margin-right:6px;fill:var(--c5)}.axis,.roof,.drop{fill:none;stroke:var(--dim)}.roof{stroke:var(--c0);
stroke-width:2}.drop{stroke-dasharray:3 3}.limit{fill:none;stroke:var(--c0);stroke-width:2}.own{fill:var(--c1)}
.failed{fill:var(--c7)}.end{text-anchor:end}
.banks rect{stroke:var(--bg)}.banks text{font-size:9px}.pad{fill:none}.t0{fill:#c6d8f5}.t1{fill:#f7dcb4}
.t2{fill:#bfe6d3}
.t3{fill:#f3c3d7}.t4{fill:#d8ccf2}.t5{fill:#bfe6f0}.t6{fill:#e6d7b0}.t7{fill:#f4c5bf}.banks text{fill:#111}
.banks .name{fill:var(--fg)}
.fold{border:1px solid var(--rule);border-radius:4px;background:var(--pane);margin-top:10px}
.fold summary{padding:6px 8px;color:var(--dim);font-size:13px;font-weight:600;cursor:pointer}
.fold pre{margin:0;padding:0 0 6px;overflow:auto;max-height:420px;font:12px/1.45 ui-monospace,monospace}
.new{background:#2da44e33}.old{background:#cf222e33}.gap{border-top:1px dashed var(--rule)}
.graph .node{fill:var(--dim)}.graph .edge{fill:none;stroke:var(--dim);stroke-width:1.5}
.graph .apart{stroke:var(--c7);stroke-dasharray:4 3}.graph .kernel{fill:var(--pane);stroke:var(--rule)}
.graph .dim{fill:var(--dim)}
.s0{fill:var(--c0)!important}.s1{fill:var(--c1)!important}.s2{fill:var(--c2)!important}.s3{fill:var(--c3)!important}
.s4{fill:var(--c4)!important}.s5{fill:var(--c5)!important}.s6{fill:var(--c6)!important}.s7{fill:var(--c7)!important}
#summary{margin:0 0 6px;padding-left:18px;font-size:15px}#summary li{margin:3px 0;max-width:80em}
.hint{margin:0 0 8px;color:var(--dim)}
.graph text,.chart text{paint-order:stroke;stroke:var(--bg);stroke-width:3px}
@media (max-width:900px){.panes{grid-template-columns:minmax(0,1fr)}.pane{max-height:260px}
main>section{overflow-x:auto}main>section>table{min-width:560px}#why table{min-width:900px}
#facts table,#calls table{min-width:0}#facts th,#calls th{width:8em}}
"""

SCRIPT = """
"use strict";(()=>{
const byStatement=new Map(),byLoop=new Map(),loops=document.getElementById("loops");
const rows=loops?[...loops.querySelectorAll(".l")]:[],numbers=new Map(rows.map((e,n)=>[e,String(n+1)]));
const owners=e=>(e.dataset.s||"").split(" ").filter(Boolean);
const box=e=>e.closest("section,details");
function put(map,key,e){if(!map.has(key))map.set(key,[]);map.get(key).push(e)}
function add(e){for(const s of owners(e))put(byStatement,s,e);if(e.dataset.l)put(byLoop,e.dataset.l,e)}
document.querySelectorAll(".l").forEach(add);
const lined=id=>["loops","asm","llvm","cuda","ptx"].includes(id);
let pinned=null;
function partners(e){
 const found=new Set([e]),loop=numbers.get(e)||e.dataset.l,from=box(e).id,own=owners(e);
 if(loop){for(const x of byLoop.get(loop)||[])found.add(x);if(rows[loop-1])found.add(rows[loop-1])}
 for(const s of own)for(const x of byStatement.get(s)||[]){
  if((loop&&lined(box(x).id)&&lined(from))||x.tagName==="TR"&&e.tagName==="TR")continue;
  if(box(x).id!=="def"&&x.tagName!=="TR"&&owners(x).some(other=>!own.includes(other)))continue;
  found.add(x)}
 return found}
function clear(name){for(const e of document.querySelectorAll("."+name))e.classList.remove(name)}
function show(e,name){clear(name);for(const x of partners(e))x.classList.add(name)}
function pin(e){
 pinned=e;clear("near");show(e,"pin");
 for(const pane of document.querySelectorAll(".pane,.fold[open]"))if(pane!==box(e)){
  const first=pane.querySelector(".pin"),area=pane.querySelector("pre");
  if(first&&area)area.scrollTop=first.offsetTop-area.offsetTop-area.clientHeight/3}}
function free(){pinned=null;clear("pin");clear("near")}
async function unpack(fold){
 const data=fold.dataset.z,area=fold.querySelector("pre");if(!data)return;delete fold.dataset.z;
 const bytes=Uint8Array.from(atob(data),c=>c.charCodeAt(0));
 const text=await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
 const lines=document.createDocumentFragment();
 for(const [line,s,l,sign] of JSON.parse(text)){
  const e=document.createElement("span");e.textContent=line+"\\n";
  e.className="l"+(s===""?"":s.includes(" ")?" cm":" c"+s%8)+(sign?" "+sign:"");
  if(s!=="")e.dataset.s=s;if(l)e.dataset.l=l;add(e);lines.append(e)}
 area.replaceChildren(lines);area.tabIndex=0;if(pinned)pin(pinned)}
document.querySelectorAll(".pane[data-z]").forEach(unpack);
for(const fold of document.querySelectorAll(".fold"))fold.addEventListener("toggle",()=>{if(fold.open)unpack(fold)});
document.addEventListener("mouseover",event=>{
 const e=event.target.closest(".l");if(e)show(e,"near");else clear("near")});
document.addEventListener("click",event=>{const e=event.target.closest(".l");if(!e)return;
 if(e===pinned)free();else pin(e)});
document.addEventListener("keydown",event=>{
 if(event.key==="Escape"){free();return}
 if(event.key!=="ArrowDown"&&event.key!=="ArrowUp")return;
 const pane=document.activeElement&&document.activeElement.closest(".pane,.fold pre");if(!pane)return;
 const own=[...pane.querySelectorAll(".l")],at=own.indexOf(pinned),step=event.key==="ArrowDown"?1:-1;
 const next=own[Math.max(0,Math.min(own.length-1,at<0?0:at+step))];
 if(next){event.preventDefault();pin(next);next.scrollIntoView({block:"nearest"})}});
const first=document.querySelector("#def [data-s]");
if(first){const area=first.closest("pre");if(first.offsetTop-area.offsetTop>area.clientHeight-40)
 area.scrollTop=first.offsetTop-area.offsetTop-40}
const wanted=/^#s([0-9]+)$/.exec(location.hash);
if(wanted){const e=(byStatement.get(wanted[1])||[])[0];if(e)pin(e)}
})();
"""
