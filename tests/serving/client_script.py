"""Everything that `client.videos` of the openai package does, against the address given."""

import json
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="The Sora API is scheduled")

import openai  # noqa: E402
import pytest  # noqa: E402

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
videos = client.videos
prompt = "a red circle moves right on a white background"
seen = set()

made = videos.create_and_poll(
    prompt=prompt, size="64x64", seconds="1", extra_body={"num_inference_steps": 3, "seed": 7}
)
assert (made.status, made.progress, made.error) == ("completed", 100, None), made
assert isinstance(made.seconds, str)
assert made.model_extra["settings"]["seed"] == 7
content = videos.download_content(made.id)
data = content.read()
assert data[4:8] == b"ftyp"
for variant in ("thumbnail", "spritesheet"):
    assert videos.download_content(made.id, variant=variant).read()

slow = videos.create(prompt=prompt, extra_body={"num_inference_steps": 60})
assert slow.status == "queued"
while slow.status in ("queued", "in_progress"):
    slow = videos.retrieve(slow.id)
    assert type(slow.progress) is int
    seen.add(slow.progress)
    time.sleep(0.01)
assert len(seen) > 3, seen

remixed = videos.remix(made.id, prompt="a blue square")
assert remixed.remixed_from_video_id == made.id
assert videos.poll(remixed.id).status == "completed"

listed = [video.id for video in videos.list(limit=1)]
assert listed == [remixed.id, slow.id, made.id], listed

for bad, code, param in (
    ({"size": "720x1280"}, "size_not_served", "size"),
    ({"extra_body": {"negativ_prompt": "x"}}, "unknown_field", "negativ_prompt"),
    ({"input_reference": b"not a picture"}, "not_offered", "input_reference"),
):
    with pytest.raises(openai.BadRequestError) as refused:
        videos.create(prompt=prompt, **bad)
    assert (refused.value.code, refused.value.param) == (code, param), refused.value
with pytest.raises(openai.NotFoundError) as missing:
    videos.download_content("video_x")
assert missing.value.code == "not_found"
assert missing.value.request_id.startswith("req_")

key = {"Idempotency-Key": "one"}
first = videos.create(prompt=prompt, extra_headers=key)
assert videos.create(prompt=prompt, extra_headers=key).id == first.id
deleted = videos.delete(first.id)
assert deleted.deleted
assert deleted.id == first.id
assert [model.id for model in client.models.list()] == ["embedded"]
print(json.dumps({"version": openai.__version__, "progress": len(seen)}))
