"""WAN Animate pipeline, with the names and arguments of diffusers.

    character -> reference frame, CLIP tokens            the same for all segments
    poses, faces, scene -> one segment after the other; each is an ordinary denoising run that
    starts from the last frames of the one before

diffusers draws the noise of all segments from one generator. Here segment 0 starts from the noise
of the seed, as any video, and segment i from that of a seed derived from both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
from jaxtyping import Float, Float32

from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import Conditioning
from maxdiffusion.models.wan.config import MASK_CHANNELS
from maxdiffusion.pipelines.preprocess.animate import (
    SegmentInputs,
    Segments,
    animate_inputs,
    reflected,
)
from maxdiffusion.pipelines.preprocess.images import ClipPreprocessor, ImageFit
from maxdiffusion.pipelines.request import Request, channels_last, request_from_arguments
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.tasks.base import (
    Conditions,
    Encoders,
    LatentShape,
    Task,
    VisualInputs,
    shape_of,
)
from maxdiffusion.pipelines.tasks.image_to_video import tokens_of
from maxdiffusion.pipelines.wan import OutputType, VideoPipeline, WanOutput
from maxdiffusion.runtime.images import ImageSource, load_image, load_video

Mode = Literal["animate", "replace"]
MODES = ("animate", "replace")
Frames = Float32[np.ndarray, "F Y X C"]
SCENE = ("background_video", "mask_video")
VIDEOS = ("pose_video", "face_video", *SCENE)


@dataclass(frozen=True, kw_only=True)
class Animate(Task):
    """One segment of a character that moves as in a video, alone or in the scene of a video.

    Channels are the mask of given pixels, then the encoded character, frames of the segment before
    and the scene. `overlap` frames are taken over from the segment before. Faces are squares of
    `face_size` pixels; `face_batch` of them are encoded together.
    """

    overlap: int
    face_size: int
    clip: ClipPreprocessor
    fit: ImageFit = "stretch"

    pipeline: ClassVar[str] = "WanAnimatePipeline"
    in_segments: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return "character to video"

    @property
    def images(self) -> int:
        return 1

    @property
    def extra_frames(self) -> int:
        return 1

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        return (1, self.length(latent, vae))

    def length(self, latent: LatentShape, vae: WanVaeConfig) -> int:
        """Returns the number of frames of a segment."""
        return vae.video_frames(latent.frames - self.extra_frames)

    def shapes(self, latent: LatentShape, videos: int) -> Conditioning:
        *video, channels = latent.dims
        pose = latent.with_frames(latent.frames - self.extra_frames)
        return Conditioning(
            channels=shape_of((videos, *video, MASK_CHANNELS + channels)),
            pose=shape_of((videos, *pose.dims)),
        )

    def condition(self, inputs: Sequence[VisualInputs], encoders: Encoders) -> Conditions:
        parts = [self._segment(one, encoders) for one in inputs]
        channels: Any = np.stack(
            [
                self._channels(one, character, part, encoders)
                for one, (character, part) in zip(inputs, parts, strict=True)
            ]
        )
        pose: Any = np.stack([encoders.video(part.pose) for _, part in parts])
        return Conditions(
            conditioning=Conditioning(channels=channels, pose=pose),
            image_tokens=np.stack([tokens_of(one, self.clip, encoders) for one in inputs]),
            faces=np.stack([part.face for _, part in parts]),
        )

    def _segment(
        self, one: VisualInputs, encoders: Encoders
    ) -> tuple[Float32[np.ndarray, "Y X C"], SegmentInputs]:
        """Returns the pixels of the character and of one segment; other frames are not resized."""
        length = self.length(encoders.latent, encoders.vae)
        span = Segments(poses=length, length=length, overlap=self.overlap).span(one.segment)
        videos = {
            name: video[reflected(len(video), span.stop)[span]]
            for name in VIDEOS
            if (video := vars(one)[name]) is not None
        }
        assert one.image is not None
        fitted = animate_inputs(
            one.image,
            **videos,
            height=encoders.height,
            width=encoders.width,
            face_size=self.face_size,
            fit=self.fit,
        )
        alone = Segments(poses=length, length=length, overlap=self.overlap)
        return fitted.character, fitted.segment(alone, 0)

    def _channels(
        self,
        one: VisualInputs,
        character: Float32[np.ndarray, "Y X C"],
        part: SegmentInputs,
        encoders: Encoders,
    ) -> Float32[np.ndarray, "F y x O"]:
        """Returns mask and encoded pixels: the character, then the video of given frames."""
        previous = None if one.previous is None else one.previous * np.float32(2) - np.float32(1)
        video = part.condition_video(previous, self.overlap)
        overlap = self.overlap if one.segment else 0
        mask = part.condition_mask(overlap, factor=encoders.vae.spatial_factor)
        latents = [encoders.video(character[None]), encoders.video(video)]
        return np.concatenate([mask, np.concatenate(latents)], axis=-1)


def make_segments(
    request: Request,
    denoise: Callable[[Request], np.ndarray],
    decode: Callable[[Request, np.ndarray], Frames],
    *,
    latents: Sequence[np.ndarray | None] = (),
) -> tuple[list[Frames], np.ndarray]:
    """Makes whole videos, segment by segment.

    Returns their frames in 0..1, each as long as its poses, and the latents of the last segment.
    `denoise` runs a request; `decode` makes the frames of one video of it. `latents` are the first
    latents of segments after the first; others are drawn.
    """
    assert isinstance(request.task, Animate)
    overlap = request.task.overlap
    poses = [poses_of(one) for one in request.inputs]
    segments = Segments(poses=max(poses), length=request.video.num_frames, overlap=overlap)
    frames: list[list[Frames]] = [[] for _ in request.inputs]
    final = np.zeros(0, np.float32)
    for index in range(segments.count):
        part = request
        if index:
            start = latents[index - 1] if index <= len(latents) else None
            part = continued(request, index, [made[-1][-overlap:] for made in frames], start)
        final = denoise(part)
        for row, made in enumerate(frames):
            whole = decode(part, final[row])
            made.append(whole[overlap:] if index else whole)
    joined = [np.concatenate(made)[:count] for made, count in zip(frames, poses, strict=True)]
    return joined, final


def continued(
    request: Request, index: int, previous: Sequence[Frames], latents: np.ndarray | None
) -> Request:
    """Returns the request of segment `index`, which continues the `previous` frames."""
    return replace(
        request,
        inputs=tuple(
            replace(one, segment=index, previous=frames)
            for one, frames in zip(request.inputs, previous, strict=True)
        ),
        seeds=tuple(segment_seed(seed, index) for seed in request.seeds),
        latents=latents,
    )


def segment_seed(seed: int, index: int) -> int:
    """Returns the seed of a segment's noise; segments of neighbouring seeds do not share any."""
    return seed if index == 0 else int(np.random.SeedSequence((seed, index)).generate_state(1)[0])


def poses_of(one: VisualInputs) -> int:
    """Returns the number of poses of a video."""
    assert one.pose_video is not None
    return len(one.pose_video)


@final
class WanAnimatePipeline(VideoPipeline):
    """A loaded WAN Animate model on a mesh."""

    def __call__(
        self,
        image: ImageSource,
        pose_video: Any,
        face_video: Any,
        background_video: Any = None,
        mask_video: Any = None,
        prompt: str | Sequence[str] = "",
        negative_prompt: str | Sequence[str] | None = None,
        *,
        height: int = 720,
        width: int = 1280,
        segment_frame_length: int = 77,
        num_inference_steps: int = 20,
        mode: Mode = "animate",
        prev_segment_conditioning_frames: int = 1,
        motion_encode_batch_size: int | None = None,
        guidance_scale: float = 1.0,
        latents: Any = None,
        image_fit: ImageFit = "stretch",
        output_type: OutputType = "np",
        max_sequence_length: int | None = None,
        **arguments: Any,
    ) -> WanOutput:
        """Generates one video for each prompt (times `num_videos_per_prompt`).

        A video has as many frames as `pose_video`, and is made in segments of
        `segment_frame_length`, each of which starts with `prev_segment_conditioning_frames` of the
        one before. Videos are paths, addresses, lists of images or arrays; white pixels of
        `mask_video` are made, black ones kept of `background_video`. `latents` [B, C, F, H, W] are
        those of the first segment, or a list with one array per segment. With output_type="latent"
        the result is that of diffusers: the last segment with its reference frame, as the VAE
        decodes it (not normalised). The other arguments are those of `request_from_arguments`.
        """
        self.check_output(output_type, max_sequence_length)
        spec = self.builder.spec
        task = animate_task(
            spec,
            length=segment_frame_length,
            overlap=prev_segment_conditioning_frames,
            motion_batch=motion_encode_batch_size,
            fit=image_fit,
        )
        given = {"background_video": background_video, "mask_video": mask_video}
        videos = {"pose_video": pose_video, "face_video": face_video, **given}
        inputs = visual_inputs(image, videos, mode)
        first, *others = latents if isinstance(latents, list | tuple) else [latents]
        request = request_from_arguments(
            spec,
            prompt=prompt,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            num_frames=segment_frame_length,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            latents=first,
            task=task,
            inputs=[inputs],
            **arguments,
        )
        shape = self.shape(request)
        frames, final = make_segments(
            request,
            self.final_latents,
            lambda part, one: np.asarray(self.decode(part, one)),
            latents=[channels_last("latents", one, shape.videos, shape.latent) for one in others],
        )
        if output_type == "latent":
            return WanOutput(frames=np.moveaxis(denormalised(final, spec.vae), -1, 1))
        video = np.stack(frames)
        return WanOutput(frames=video if output_type == "np" else bytes_of(video))


def animate_task(
    spec: WanSpec,
    *,
    length: int,
    overlap: int,
    motion_batch: int | None = None,
    fit: ImageFit = "stretch",
) -> Animate:
    """Returns the task of an Animate checkpoint; raises if it is another, or numbers are wrong.

    Segments of `length` frames take `overlap` frames over from the one before.
    """
    face, encoder = spec.transformer.face, spec.image_encoder
    if face is None or encoder is None:
        rule = "this checkpoint takes no poses and faces, or lacks the image encoder"
        problem = Problem(name="pose_video", value="given", rule=rule, remedy="Use WAN 2.2 Animate")
        raise ProblemsFound([problem])
    if motion_batch is not None and motion_batch < 1:
        name, rule = "motion_encode_batch_size", "must be a positive integer"
        raise ProblemsFound([Problem(name=name, value=motion_batch, rule=rule)])
    Segments(poses=1, length=length, overlap=overlap)  # raises unless segments can go on
    return Animate(
        overlap=overlap,
        face_size=face.size,
        face_batch=motion_batch or face.batch,
        clip=ClipPreprocessor.from_config(spec.image_processor or {}),
        clip_tokens=encoder.tokens,
        fit=fit,
    )


def visual_inputs(image: ImageSource, videos: dict[str, Any], mode: Mode) -> VisualInputs:
    """Returns the loaded inputs of a mode; raises everything that is wrong with them."""
    problems = Collector(check_mode(mode, videos))
    loaded: dict[str, Any] = {}
    with problems:
        loaded["image"] = load_image(image, name="image")
    for name, source in videos.items():
        if source is not None:
            with problems:
                loaded[name] = load_video(source, name=name)
    problems.raise_if_any()
    return VisualInputs(**loaded)


def check_mode(mode: str, videos: dict[str, Any]) -> list[Problem]:
    """Returns the problems of a mode and the videos that it needs."""
    if mode not in MODES:
        rule = f"must be one of {', '.join(MODES)}"
        return [Problem(name="mode", value=mode, rule=rule)]
    unused = SCENE if mode == "animate" else ()
    problems = [
        Problem(name=name, value=None, rule=f"mode {mode} needs it", remedy="Give a video")
        for name in VIDEOS
        if name not in unused and videos[name] is None
    ]
    rule, remedy = "mode animate does not take it", "Leave it out, or use mode=replace"
    return problems + [
        Problem(name=name, value="given", rule=rule, remedy=remedy)
        for name in unused
        if videos[name] is not None
    ]


def denormalised(
    latents: Float[np.ndarray, "B F Y X C"], vae: WanVaeConfig
) -> Float[np.ndarray, "B F Y X C"]:
    """Returns latents as the VAE decodes them."""
    mean, std = (np.asarray(row, np.float32) for row in (vae.latents_mean, vae.latents_std))
    return latents * std + mean


def bytes_of(frames: Float[np.ndarray, "... C"]) -> np.ndarray:
    """Returns frames from 0 to 255, truncated as diffusers does before it writes a video."""
    return (frames * np.float32(255)).astype(np.uint8)
