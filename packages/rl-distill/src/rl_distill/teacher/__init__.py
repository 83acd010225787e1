"""Teachers: routing of prompts, scoring of trajectories, and checks of the scores before training.

Everything except `megatron_teacher` imports without torch.
"""

from rl_distill.teacher.aligned import SpanMode, TeacherAligner, read_pieces
from rl_distill.teacher.engine_teacher import EngineReplica
from rl_distill.teacher.host import TeacherHost
from rl_distill.teacher.model_folder import model_fingerprint, model_traits
from rl_distill.teacher.options import ESTIMATORS, DistillationOptions, SelfTeacherOptions, TeacherOptions
from rl_distill.teacher.protocol import TeacherPlan, TeacherReplica
from rl_distill.teacher.replicas import MakeReplica, ReplicatedTeacher
from rl_distill.teacher.routing import TeacherRouter, route_problems
from rl_distill.teacher.score_cache import ScoreCache, ScoreKind
from rl_distill.teacher.scoring import ServiceReport
from rl_distill.teacher.self_teaching import TEACHER_PROMPT, ScoreTokens, with_self_scores
from rl_distill.teacher.service import TeacherService, TeacherServiceOptions, teacher_task
from rl_distill.teacher.texts import TextOptions, count_texts, trajectories_from_texts
from rl_distill.teacher.vocabulary import check_same_vocabulary, compare_vocabularies

__all__ = [
    "ESTIMATORS",
    "TEACHER_PROMPT",
    "DistillationOptions",
    "EngineReplica",
    "MakeReplica",
    "ReplicatedTeacher",
    "ScoreCache",
    "ScoreKind",
    "ScoreTokens",
    "SelfTeacherOptions",
    "ServiceReport",
    "SpanMode",
    "TeacherAligner",
    "TeacherHost",
    "TeacherOptions",
    "TeacherPlan",
    "TeacherReplica",
    "TeacherRouter",
    "TeacherService",
    "TeacherServiceOptions",
    "TextOptions",
    "check_same_vocabulary",
    "compare_vocabularies",
    "count_texts",
    "model_fingerprint",
    "model_traits",
    "read_pieces",
    "route_problems",
    "teacher_task",
    "trajectories_from_texts",
    "with_self_scores",
]
