import sys, tempfile, pathlib, json
sys.path[:0]=["tests","tests/equivalence"]
import pytest
import os; FAM=os.environ["FAM"]
def test_x(tiny,tmp_path):
    from videos import write_video
    from vllm_scenes import facts, questions, start
    clip=write_video(tmp_path/"clip.mp4",range(91),size=(64,32))
    (tmp_path/"f").mkdir()
    p=start({f"agreement:{FAM}":questions(tiny(FAM),FAM,clip,tmp_path/"f")},tmp_path)
    f=facts(p,tmp_path)[f"agreement:{FAM}"]
    print(json.dumps({k:v for k,v in f.items() if "ids" not in k},indent=1))
