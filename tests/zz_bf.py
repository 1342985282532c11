import traceback, sys, time
import tests.distributed.test_tensor_parallel as t
def go(rank,n,*names):
    for name,args in names:
        s=time.time()
        try: getattr(t,name)(rank,n,*args); print("OK ",name,args,f"{time.time()-s:.0f}s")
        except BaseException as e:
            tb=traceback.format_exc().splitlines()
            print("BAD",name,args); print("\n".join(tb[-14:])[:2500])
