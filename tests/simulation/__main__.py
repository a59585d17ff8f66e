"""`python -m tests.simulation --seeds 1000`, or `--seed N --log` to live through one again."""
from tests.simulation.scenario import draw
from tests.simulation.world import World
import sys, time, logging, structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
a,b=int(sys.argv[1]),int(sys.argv[2])
show=print if len(sys.argv)>3 else None
from collections import Counter
total=Counter(); errs=Counter()
t=time.time()
for seed in range(a,b):
    w=World(draw(seed),show)
    try:
        w.run(); total+=w.counts
    except Exception as e:
        print(seed, str(e)[:300]); errs[str(e)[15:60]]+=1
        if show: raise
print(time.time()-t)
for k,v in sorted(total.items()): print(v,k)
print(errs)
