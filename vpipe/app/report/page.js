for(const f of document.querySelectorAll('.timeline')){
const z=f.querySelector('.zoom'),o=f.querySelector('output'),s=f.querySelector('.scroll');let on;
z.hidden=false;
z.addEventListener('click',e=>{const b=e.target.closest('button');if(!b)return;
const m=(s.scrollLeft+s.clientWidth/2)/s.scrollWidth;f.dataset.zoom=b.value;
for(const c of z.children)c.setAttribute('aria-pressed',c===b);s.scrollLeft=m*s.scrollWidth-s.clientWidth/2});
const show=e=>{const c=e.target.closest('rect');if(!c||!c.firstChild)return;if(on)on.classList.remove('on');
on=c;c.classList.add('on');o.textContent=c.firstChild.textContent};
s.addEventListener('pointerover',show);s.addEventListener('click',show)}
