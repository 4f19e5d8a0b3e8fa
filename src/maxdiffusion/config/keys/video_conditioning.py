"""Keys of image-to-video and of character animation, which load and print but do not run yet."""

from maxdiffusion.config.kinds import Integer, Nullable, Number, Text
from maxdiffusion.config.schema import unused

KEYS = (
    unused("image_url", Text(), "", "I2V: path or address of the first frame."),
    unused("mode", Text(), "animate", "Animate: animate a person or replace one."),
    unused("reference_image_path", Text(), "", "Animate: image of the person."),
    unused("pose_video_path", Text(), "", "Animate: video of poses."),
    unused("face_video_path", Text(), "", "Animate: video of the face."),
    unused("background_video_path", Text(), "", "Animate, replace: video of the background."),
    unused("mask_video_path", Text(), "", "Animate, replace: video of the mask."),
    unused("segment_frame_length", Integer(minimum=1), 77, "Animate: frames of a segment."),
    unused(
        "prev_segment_conditioning_frames",
        Integer(minimum=0),
        1,
        "Animate: frames that a segment takes over from the one before.",
    ),
    unused(
        "motion_encode_batch_size",
        Nullable(Integer(minimum=1)),
        None,
        "Animate: frames encoded at once by the motion encoder.",
    ),
    unused("animate_guidance_scale", Number(), 1.0, "Animate: strength of guidance."),
)
