// offsetof as a constant expression. NVRTC has no <cstddef> and no __builtin_offsetof; its front end has the intrinsic
// by which <cstddef> defines offsetof.
#pragma once

#ifndef offsetof
#define offsetof(type, member) __INTADDR__(&((static_cast<type*>(nullptr))->member))
#endif
