// offsetof as a constant: NVRTC has neither <cstddef> nor the compilers' built-in of that name, but the intrinsic of its front
// end by which <cstddef> would define it.
#pragma once

#ifndef offsetof
#define offsetof(type, member) __INTADDR__(&((static_cast<type*>(nullptr))->member))
#endif
